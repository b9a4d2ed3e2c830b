"""One device, many staggered micro-batches: equal to the reference bit for bit, within the schedule's memory."""

from itertools import combinations, cycle

import pytest
import torch
from torch import nn

from armillary.reference.versions import Reference
from armillary.schedules import NORMS, Clip
from armillary.schedules.accumulation import accumulation
from armillary.schedules.cyclic import cyclic
from armillary.schedules.cyclic_pipeline import cyclic_pipeline
from armillary.schedules.delayed_all_reduce import delayed_all_reduce
from armillary.schedules.gpipe import gpipe
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.schedules.routes import refuse_on_one_device
from armillary.schedules.simultaneous import simultaneous
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import TrainSpec
from staged_models import (
    EVERY_CLIP,
    LOOSE,
    OPTIMIZERS,
    TIGHT,
    Careful,
    Twice,
    as_stages,
    data,
    drop,
    rings,
    same,
    squared_error,
    stages_of,
    weights,
)

STEPS, DROP = 5, 2


def run_reference(schedule, optimizer="momentum", dtype=torch.float64, drains=(), **options):
    clip = options.pop("clip", None)
    stages = stages_of(schedule.stages, dtype, **options)
    made = OPTIMIZERS[optimizer](stages.parameters())
    reference, scheduler = Reference(stages, made, schedule, squared_error, clip=clip), drop(made, DROP)
    losses = []
    for step, batches in enumerate(data(STEPS, schedule.micro_batches, dtype)):
        if step in drains:
            reference.drain()
        losses.append(reference.step(batches))
        scheduler.step()
    return stages, losses


def run_one_device(schedule, optimizer="momentum", dtype=torch.float64, drains=(), settles=(), **options):
    observe, recompute = options.pop("observe", lambda *_: None), options.pop("recompute", ())
    clip = options.pop("clip", None)
    stages = stages_of(schedule.stages, dtype, **options)
    made = OPTIMIZERS[optimizer](stages.parameters())
    run = Interpreter(
        as_stages(stages),
        made,
        TrainSpec(schedule, squared_error, recompute=frozenset(recompute), clip=clip, observe=observe),
    )
    scheduler = drop(made, DROP)
    finished = []
    for step, batches in enumerate(data(STEPS, schedule.micro_batches, dtype)):
        if step in drains:
            finished += run.drain()
        if step in settles:
            finished += run.settle()
        finished += run.step(batches)
        scheduler.step()
    finished += run.settle()
    assert [one.step for one in finished] == list(range(STEPS))
    return stages, [list(one.losses) for one in finished]


def equal(schedule, **options):
    shared = {key: value for key, value in options.items() if key not in ("settles", "recompute", "observe")}
    (truth, true_losses), (got, losses) = run_reference(schedule, **shared), run_one_device(schedule, **options)
    return (
        same(weights(truth), weights(got))
        and same(truth.buffers(), got.buffers())
        and all(same(these, those) for these, those in zip(true_losses, losses, strict=True))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_it_trains_as_the_reference_does_bit_for_bit(workers, dtype):
    for schedule in rings(workers):
        assert equal(schedule, dtype=dtype), schedule


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_is_stepped_with_the_rate_of_the_gradients_step(optimizer):
    assert equal(cyclic(3, slack=1), optimizer=optimizer)


@pytest.mark.parametrize(
    "schedule",
    [
        simultaneous(3, 2),
        accumulation(3, 2),
        delayed_all_reduce(3, 2),
        gpipe(3, 2),
        one_f_one_b(3, 4),
        cyclic_pipeline(3, 4),
    ],
    ids=lambda schedule: schedule.name,
)
def test_every_schedule_can_be_carried_out_on_one_device(schedule):
    assert equal(schedule)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d, lambda width: nn.GroupNorm(1, width)])
def test_normalisation_and_its_running_statistics_are_those_of_the_reference(norm):
    assert equal(cyclic(3), norm=norm)
    assert equal(cyclic(3), norm=norm, recompute={0, 2})


def test_a_stage_that_runs_again_before_its_backward_changes_nothing():
    for recompute in ({1}, {0, 1, 2}):
        assert equal(cyclic(3), recompute=recompute, dropout=0.5)


def test_settling_changes_nothing_and_a_drain_is_the_references_drain():
    assert equal(cyclic(3, slack=1), settles=(1, 3))
    assert equal(cyclic(3, slack=1), drains=(2, 4))
    assert equal(cyclic_pipeline(3, 2), drains=(3,))
    drained, undrained = run_one_device(cyclic(3, slack=1), drains=(2,)), run_one_device(cyclic(3, slack=1))
    assert not same(weights(drained[0]), weights(undrained[0]))


def test_after_settling_the_model_holds_the_newest_weights():
    stages = stages_of(3)
    optimizer = OPTIMIZERS["momentum"](stages.parameters())
    run = Interpreter(as_stages(stages), optimizer, TrainSpec(cyclic(3, slack=3), squared_error))
    reference_stages = stages_of(3)
    reference = Reference(
        reference_stages, OPTIMIZERS["momentum"](reference_stages.parameters()), cyclic(3, slack=3), squared_error
    )
    for batches in data(3, 3):
        run.step(batches)
        reference.step(batches)
        run.settle()
        assert same(weights(stages), weights(reference_stages))


def test_each_action_reads_the_version_the_schedule_names_both_ways():
    for schedule in rings(3):
        seen = {}
        run_one_device(schedule, observe=lambda due, version, held: seen.setdefault(due.place, []).append(version))  # noqa: B023
        assert seen == {place: [schedule.version(place)] * 2 for place in seen}
        assert len(seen) == STEPS * schedule.micro_batches * schedule.stages


def test_the_activations_held_are_the_schedules_at_every_tick():
    for schedule in [*rings(2), *rings(3), cyclic(4), accumulation(3, 2)]:
        after = {}

        def observe(due, version, held, after=after):
            after[due.tick] = set(held)

        run_one_device(schedule, observe=observe)
        existing = {due for due in after if due < STEPS * schedule.period}
        assert all(after[tick] == schedule.held_after(tick) for tick in existing)
        assert len(existing) > STEPS


def test_at_most_two_versions_of_a_stage_live_and_one_of_a_stage_that_is_never_stale():
    for slack, most in ((0, [2, 2, 1]), (3, [2, 2, 2])):
        stages = stages_of(3)
        optimizer = OPTIMIZERS["sgd"](stages.parameters())
        kept = [set(), set(), set()]

        def observe(due, version, held, kept=kept):
            for j, store in run._weights.items():  # noqa: B023
                flying = {flight.version for place, flight in run._flights.items() if place[2] == j}  # noqa: B023
                kept[j].add(len(flying.union(store.versions)))

        run = Interpreter(
            as_stages(stages), optimizer, TrainSpec(cyclic(3, slack=slack), squared_error, observe=observe)
        )
        for batches in data(4, 3):
            run.step(batches)
        assert [max(counts) for counts in kept] == most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by", NORMS)
def test_clipping_is_the_references_bit_for_bit(by, dtype):
    norms = cycle((TIGHT, LOOSE))
    for made in [cyclic(1), *rings(3)[1::2], cyclic(4, slack=2), cyclic_pipeline(3, 2, 2), cyclic_pipeline(3, 4, 3)]:
        clip = Clip(next(norms), by)
        if by != "global" or has_time(made):
            assert equal(made, clip=clip, dtype=dtype), (made, clip)
    assert equal(cyclic(3, slack=3), clip=Clip(TIGHT, by), drains=(2, 4), settles=(1, 3), optimizer="adagrad")
    assert equal(gpipe(3, 2), clip=Clip(TIGHT, by))


def has_time(schedule):
    try:
        refuse_on_one_device(schedule, Clip(1.0))
    except ValueError:
        return False
    return True


def test_the_norms_differ_and_a_norm_known_too_late_is_refused():
    finals = [weights(run_one_device(cyclic(3, slack=1), clip=clip)[0]) for clip in (None, *EVERY_CLIP)]
    assert not any(same(one, other) for one, other in combinations(finals, 2))
    stages = stages_of(3)
    optimizer = OPTIMIZERS["sgd"](stages.parameters())
    with pytest.raises(ValueError, match="cannot clip by the global norm: micro-batch 0 reads new weights of stage 2"):
        Interpreter(as_stages(stages), optimizer, TrainSpec(cyclic(3), squared_error, clip=Clip(1.0)))


def test_tuples_and_dicts_and_skip_connections_cross_stages():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, value):
            return {"skip": value, "body": (torch.tanh(self.inner(value)), value > 0, 3)}

    class Through(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, value):
            body, mask, factor = value["body"]
            return [value["skip"], self.inner(body) * mask, factor]

    class Join(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, value):
            skip, body, factor = value
            return self.inner(skip + factor * body)

    results = []
    for runner in ("reference", "one_device", "recomputed"):
        torch.manual_seed(0)
        stages = nn.ModuleList([nn.Linear(5, 5), Fork(), Through(), Join()]).double()
        optimizer = OPTIMIZERS["adam"](stages.parameters())
        schedule = cyclic(2, 4)
        if runner == "reference":
            run = Reference(stages, optimizer, schedule, squared_error)
        else:
            again = frozenset(range(4) if runner == "recomputed" else ())
            run = Interpreter(as_stages(stages), optimizer, TrainSpec(schedule, squared_error, recompute=again))
        for batches in data(4, 2):
            run.step(batches)
        if runner != "reference":
            run.settle()
        results.append(weights(stages))
    assert same(results[0], results[1]) and same(results[0], results[2])


def under_autocast(make, around):
    """Weights after training with autocast around every step, or around everything, the last settling included."""
    torch.manual_seed(0)
    stages = nn.ModuleList([Twice(), Careful(), nn.Sequential(nn.Dropout(0.2), Twice())])
    run = make(stages, OPTIMIZERS["momentum"](stages.parameters()))
    with torch.autocast("cpu", torch.bfloat16, enabled=around == "everything"):
        for batches in data(4, 3, torch.float32):
            with torch.autocast("cpu", torch.bfloat16):
                run.step(batches)
        if isinstance(run, Interpreter):
            run.settle()
    return weights(stages)


@pytest.mark.parametrize("around", ["step", "everything"])
@pytest.mark.parametrize("recompute", [(), (0, 1, 2)])
def test_a_forward_runs_under_the_autocast_of_its_own_step_however_late_it_is(recompute, around):
    truth = under_autocast(lambda stages, made: Reference(stages, made, cyclic(3, slack=1), squared_error), around)
    spec = TrainSpec(cyclic(3, slack=1), squared_error, recompute=frozenset(recompute))
    got = under_autocast(lambda stages, made: Interpreter(as_stages(stages), made, spec), around)
    assert same(got, truth)


def test_no_cast_of_weights_is_kept_beyond_a_stages_forward():
    """Torch would keep every version's casts until the user's autocast ends, which may be around the whole training."""
    stages = stages_of(2, torch.float32)
    run = Interpreter(
        as_stages(stages), OPTIMIZERS["sgd"](stages.parameters()), TrainSpec(cyclic(2, slack=2), squared_error)
    )
    with torch.autocast("cpu", torch.bfloat16):
        run.step(data(1, 2, torch.float32)[0])
        read = run._weights[0].read(0, 0, 0)["0.weight"]
        with torch.no_grad():
            read.zero_()
            assert not nn.functional.linear(torch.ones(1, 5), read).any()


def test_gradients_from_elsewhere_are_refused():
    stages = stages_of(2)
    optimizer = OPTIMIZERS["sgd"](stages.parameters())
    run = Interpreter(as_stages(stages), optimizer, TrainSpec(cyclic(2), squared_error))
    stages[0][0].weight.grad = torch.ones_like(stages[0][0].weight)
    with pytest.raises(RuntimeError, match=r"1 parameters of shapes \[\(5, 5\)\] have gradients that no schedule made"):
        run.step(data(1, 2)[0])


def test_what_does_not_fit_the_schedule_is_refused():
    stages = stages_of(2)
    optimizer = OPTIMIZERS["sgd"](stages.parameters())
    with pytest.raises(ValueError, match="3 stages, the model is cut into 2"):
        Interpreter(as_stages(stages), optimizer, TrainSpec(cyclic(3), squared_error))
    with pytest.raises(ValueError, match="got 3 micro-batches, want 2"):
        Interpreter(as_stages(stages), optimizer, TrainSpec(cyclic(2), squared_error)).step(data(1, 3)[0])
    with pytest.raises(ValueError, match=r"cannot recompute stages \[2\]; the schedule has 2"):
        TrainSpec(cyclic(2), squared_error, recompute=frozenset({1, 2}))


def test_only_a_stage_that_is_read_old_is_copied_for_its_next_version():
    """Of the cyclic schedule at slack 0, the last stage is never read old."""
    stages = stages_of(3)
    run = Interpreter(as_stages(stages), OPTIMIZERS["sgd"](stages.parameters()), TrainSpec(cyclic(3), squared_error))
    first = [stage[0].weight.data for stage in stages]  # kept, so that no later version can lie in the same place
    for batches in data(4, 3):
        run.step(batches)
    run.settle()
    assert [stage[0].weight.data_ptr() == kept.data_ptr() for stage, kept in zip(stages, first)] == [False, False, True]
