"""A ring that keeps no weights: equal to the reference bit for bit, and holding what the schedule counts, not more."""

import dataclasses
import gc
from itertools import cycle, product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from armillary.reference.versions import Reference
from armillary.schedules import NORMS, Clip
from armillary.schedules.costs import held_copies
from armillary.schedules.cyclic import cyclic
from armillary.schedules.delayed_all_reduce import delayed_all_reduce
from armillary.schedules.routes import owner_of
from armillary.schedules.simultaneous import simultaneous
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import TrainSpec, in_a_row
from armillary.stages.weights import Borrowed, StageWeights
from armillary.transport.point_to_point import Mailbox
from channels import GlooChannel, in_threads
from ring_truth import STEPS, Late, has_time, short, trained, truth, without_collectives
from staged_models import (
    EVERY_CLIP,
    LOOSE,
    OPTIMIZERS,
    TIGHT,
    as_stages,
    data,
    rings,
    same,
    squared_error,
    stages_of,
    weights,
)


def worker_of(model, optimizer, schedule, channel, rank, **spec):
    seat = in_a_row(schedule, rank, channel, one_queue=spec.pop("rule", "gloo") == "nccl")
    return Interpreter(as_stages(model), optimizer, TrainSpec(schedule, squared_error, lends=True, **spec), seat)


def one_worker(rank, channel, schedule, optimizer="momentum", dtype=torch.float64, drains=(), settles=(), **options):
    """Worker `rank`; returns stages owned, losses, buffers, number of states, and weight bytes per action."""
    clip, rule = options.pop("clip", None), options.pop("rule", "gloo")
    autocast, held = options.pop("autocast", None), []
    model = nn.Sequential(*stages_of(schedule.stages, dtype, **options))
    made = OPTIMIZERS[optimizer](model.parameters())
    run = worker_of(model, made, schedule, channel, rank, clip=clip, rule=rule)
    watch(run, held)
    losses = trained(run, made, rank, dtype, drains, settles, autocast)
    return newest(run, model), losses, list(model.buffers()), len(made.state), held


def newest(run, model):
    """Of the stages that are owned here."""
    return {j: weights(stage) for j, stage in enumerate(model) if j not in run.borrowed}


def watch(run, found):
    """Will hold, for every action that is run, the bytes of weights that are alive on this worker."""
    sizes = {j: sum(p.nbytes for p in stage.module.parameters()) for j, stage in run._stages.items()}
    owned = sum(size for j, size in sizes.items() if j not in run.borrowed)

    def before(act):
        def look(one):
            older = [tensor for kept in run._weights.values() for tensor in kept.older()] if run.borrowed else []
            flats = [*run._mailbox.held(), *(flat for kept in run.borrowed.values() for flat in kept.held())]
            alive = {flat.untyped_storage().data_ptr(): flat.nbytes for flat in flats if flat.nbytes in sizes.values()}
            found.append(owned + sum(alive.values()) + sum(tensor.nbytes for tensor in older))
            act(one)

        return look

    run._carries = {**run._carries, "F": before(run._forward), "B": before(run._backward)}


def holds(schedule, options, answers):
    """Asserts that homes end where the reference does, and every worker lost and counted what it does."""
    shared = {key: value for key, value in options.items() if key not in ("settles", "rule")}
    final, losses, buffers = truth(schedule, **shared)
    got = {}
    for worker, (mine, own_losses, own_buffers, states, _) in enumerate(answers):
        assert sorted(mine) == [j for j in range(schedule.stages) if owner_of(schedule, j) == worker]
        got |= mine
        assert same(own_losses, [step[worker] for step in losses]), (worker, str(schedule), options)
        assert same(own_buffers, [buffer for stage in buffers[worker] for buffer in stage.values()])
        if options.get("optimizer", "momentum") != "sgd":
            assert states == sum(len(part) for part in mine.values())
    assert same([weight for stage in sorted(got) for weight in got[stage]], final), (str(schedule), options)


def job(rank, world, cases):
    """Every case one after the other; processes beyond the last worker rest."""
    with without_collectives():
        return [
            one_worker(rank, GlooChannel(), schedule, **options) if rank < schedule.workers else None
            for schedule, options in cases
        ]


def compare(crew, cases):
    replies = crew(4).run(job, cases)
    for place, (schedule, options) in enumerate(cases):
        holds(schedule, options, [reply[place] for reply in replies[: schedule.workers]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_trains_as_the_reference_does_bit_for_bit(crew, dtype):
    """N = 1 to 4; K = N, 2N and unequal; slack 0, 1 and N."""
    compare(crew, [(schedule, {"dtype": dtype}) for n in (1, 2, 3, 4) for schedule in rings(n)])


def test_without_staleness_it_is_synchronous_data_parallelism_in_worker_order(crew):
    compare(crew, [(simultaneous(3, 2), {}), (simultaneous(4, 4), {}), (delayed_all_reduce(3, 2), {})])


def test_every_optimizer_keeps_its_state_at_home_only(crew):
    compare(crew, [(cyclic(3, slack=place % 2), {"optimizer": name}) for place, name in enumerate(OPTIMIZERS)])


def test_drains_settling_and_buffers_per_worker_are_the_references(crew):
    cases = [
        (cyclic(4), {"drains": (1, 4)}),
        (cyclic(4, slack=4), {"drains": (2,), "settles": (4,)}),
        (cyclic(4, 8, slack=1), {"drains": (0, 3), "settles": (1, 2, 3)}),
        (cyclic(3, 5, slack=1), {"settles": (2, 3), "norm": nn.BatchNorm1d}),
        (cyclic(2, 6), {"drains": (1, 2, 3, 4)}),
    ]
    compare(crew, cases)


@pytest.mark.parametrize("around", ["forward and loss", "everything"])
def test_under_autocast_the_weights_are_the_references(crew, around):
    half = {"autocast": around, "dtype": torch.float32}
    options = [half, {**half, "norm": None, "drains": (2,)}, {**half, "clip": Clip(TIGHT, "previous"), "settles": (3,)}]
    compare(crew, [(schedule, option) for schedule in (cyclic(3), cyclic(2, 4, 1)) for option in options])


def test_clipping_is_the_references_bit_for_bit(crew):
    schedules = [cyclic(1), *rings(2)[::2], *rings(3)[1::3], *rings(4)[5:], simultaneous(3, 2)]
    allowed = [(s, by) for s, by in product(schedules, NORMS) if by != "global" or has_time(s)]
    dtypes, bounds = cycle((torch.float32, torch.float64)), cycle((TIGHT, TIGHT, LOOSE))
    cases = [(s, {"clip": Clip(next(bounds), by), "dtype": next(dtypes)}) for s, by in allowed]
    assert {case["clip"].by for _, case in cases} == set(NORMS)
    late = {"drains": (2, 4), "settles": (1, 3)}
    cases += [(cyclic(4, 5, slack=4), {"clip": clip, "optimizer": "adamw", **late}) for clip in EVERY_CLIP]
    compare(crew, cases)


# What it holds


@pytest.mark.parametrize("schedule", [*rings(1), *rings(2), *rings(3), cyclic(4, 8), cyclic(5, 7, 2)], ids=short)
def test_the_weight_bytes_on_a_worker_are_the_schedules_count(schedule):
    """In every action of the steady state, in which the next step is always handed in."""
    answers = in_threads(schedule.workers, lambda rank, channel: one_worker(rank, channel, schedule, dropout=0.0))
    sizes = [sum(p.nbytes for p in stage.parameters()) for stage in stages_of(schedule.stages)]
    for worker, (*_, held) in enumerate(answers):
        want = [sum(sizes[j] * n for j, n in copies.items()) for copies in held_copies(schedule, worker)]
        assert held[3 * len(want) : -len(want)] == want * (STEPS - 4), (worker, str(schedule))


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Mailbox, "over", lambda self, letter: [pending.wait() for pending, _ in self._under_way[letter]]),
        (Borrowed, "let_go", lambda self, letter: None),
        (StageWeights, "forget", lambda self, before: None),
    ],
    ids=["sent and kept", "borrowed and kept", "stepped beyond and kept"],
)
def test_weights_kept_instead_of_dropped_are_more_than_the_schedules_count(owner, name, fault, monkeypatch):
    monkeypatch.setattr(owner, name, fault)
    schedule = cyclic(3, 6, slack=3)
    answers = in_threads(3, lambda rank, channel: one_worker(rank, channel, schedule, dropout=0.0))
    sizes = [sum(p.nbytes for p in stage.parameters()) for stage in stages_of(6)]
    counted = [
        max(sum(sizes[j] * n for j, n in copies.items()) for copies in held_copies(schedule, worker))
        for worker in range(3)
    ]
    assert any(max(held) > most for (*_, held), most in zip(answers, counted, strict=True))


def alive_bytes(rank, world, schedule):
    """Whether neither the model's parameters nor the leaves of graphs hold weights that others own."""
    model = nn.Sequential(*stages_of(schedule.stages, dropout=0.0))
    run = worker_of(model, OPTIMIZERS["sgd"](model.parameters()), schedule, GlooChannel(), rank)
    blank, graphs = [], 0

    def look(one, version, held):
        nonlocal graphs
        flights = [flight for (_, _, j), flight in run._flights.items() if j in run.borrowed]
        leaves = [leaf for flight in flights for leaf in flight.reads.weights.values()]
        mine = [p for j in run.borrowed for p in model[j].parameters()]
        blank.extend(p.untyped_storage().nbytes() == p.element_size() for p in [*leaves, *mine])
        graphs += len(flights)

    observe = look
    run._spec = dataclasses.replace(run._spec, observe=observe)
    for batches in data(STEPS, world):
        run.step([batches[rank]])
        blank.append(all(p.grad is None for p in model.parameters()))
    run.drain()
    gc.collect()
    return all(blank) and graphs > 0 and not list(run.beside())


def test_between_two_uses_parameters_and_graphs_hold_no_weights_and_after_a_drain_nothing_is_under_way(crew):
    assert crew(2).run(alive_bytes, cyclic(2, 4)) == [True, True]


# Who is late, who looks


@pytest.mark.parametrize("rule", ["gloo", "nccl"])
@pytest.mark.parametrize("schedule", [*rings(3)[::2], cyclic(5), cyclic(5, 3, 5), cyclic(4, 7, 1)], ids=short)
def test_nothing_depends_on_who_is_late_and_nobody_waits_for_ever(schedule, rule):
    options = {"dropout": 0.0, "settles": (2,), "drains": (3,), "clip": Clip(TIGHT, "previous"), "rule": rule}
    answers = in_threads(
        schedule.workers, lambda rank, channel: one_worker(rank, Late(channel, rank), schedule, **options), rule
    )
    holds(schedule, options, answers)


@pytest.mark.parametrize("schedule", [cyclic(2, 4, slack=2), cyclic(2, 3)], ids=short)
def test_settling_changes_nothing_and_owners_have_the_newest_weights(schedule):
    def alone(rank, channel, looks):
        model = nn.Sequential(*stages_of(schedule.stages, dropout=0.0))
        run = worker_of(model, OPTIMIZERS["momentum"](model.parameters()), schedule, channel, rank)
        seen = []
        for batches in data(STEPS, 2):
            run.step([batches[rank]])
            if looks:
                run.settle()
                seen.append({j: [w.clone() for w in own] for j, own in newest(run, model).items()})
        run.drain()
        return seen, newest(run, model)

    looked, plain = (in_threads(2, lambda rank, channel, o=o: alone(rank, channel, o)) for o in (True, False))
    stages = stages_of(schedule.stages, dropout=0.0)
    reference = Reference(stages, OPTIMIZERS["momentum"](stages.parameters()), schedule, squared_error)
    for step, batches in enumerate(data(STEPS, 2)):
        reference.step(batches)
        for seen, _ in looked:
            assert all(same(own, weights(stages[j])) for j, own in seen[step].items())
    for (_, one), (_, other) in zip(looked, plain, strict=True):
        assert all(same(one[j], other[j]) for j in one)


# Unusual models


class Sometimes(nn.Module):
    """Uses one of its layers only for some inputs, another never."""

    def __init__(self):
        super().__init__()
        self.always, self.rarely, self.never = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, value):
        value = self.always(value)
        return self.rarely(value) if value.sum() > 0 else value


class Again(nn.Module):
    """Runs its layer a second time, inside backward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, value):
        if not value.requires_grad:
            value = value.detach().requires_grad_()
        return checkpoint(self.inner, value, use_reentrant=False, preserve_rng_state=False)


def model_of(middle):
    stages = stages_of(3, dropout=0.0)
    with torch.no_grad():
        for place, parameter in enumerate(middle.double().parameters()):
            parameter.fill_(0.1 * (place + 1))
    return nn.Sequential(stages[0], middle, stages[2])


@pytest.mark.parametrize(
    "middle", [Sometimes, lambda: Again(nn.Linear(5, 5)), nn.Identity], ids=["unused", "again", "none"]
)
def test_parameters_only_some_use_recomputation_and_stages_without_parameters_are_the_references(middle):
    schedule = cyclic(2, 3, slack=1)
    whole = model_of(getattr(middle(), "inner", middle()))  # functional_call cannot run a part again, inside backward
    reference = Reference(list(whole), OPTIMIZERS["momentum"](whole.parameters()), schedule, squared_error)
    for batches in data(STEPS, 2):
        reference.step(batches)

    def alone(rank, channel):
        own = model_of(middle())
        optimizer = OPTIMIZERS["momentum"](own.parameters())
        run = worker_of(own, optimizer, schedule, channel, rank)
        for batches in data(STEPS, 2):
            run.step([batches[rank]])
        run.drain()
        return newest(run, own)

    got = dict(sorted(pair for answer in in_threads(2, alone) for pair in answer.items()))
    assert same([weight for mine in got.values() for weight in mine], weights(whole))


# What is refused


def test_what_is_no_ring_is_refused():
    model = nn.Sequential(*stages_of(2))
    old = dataclasses.replace(cyclic(2), staleness=((2, 1), (2, 0)))
    for schedule, clip, complaint in (
        (cyclic(3), None, "cyclic has 3 stages, the model is cut into 2"),
        (old, None, "weights more than one step old"),
        (cyclic(2), Clip(1.0), "wanted at tick 1, and the norm .* known from tick 2"),
    ):
        with pytest.raises(ValueError, match=complaint):
            worker_of(model, OPTIMIZERS["sgd"](model.parameters()), schedule, GlooChannel(), 0, clip=clip)
