"""A ring that keeps no weights: equal to the reference bit for bit, and holding what the schedule counts, not more."""

import dataclasses
import gc
import math
from collections import Counter
from itertools import cycle, product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from armillary.reference.cyclic import Reference
from armillary.runtime.cyclic.courier import Courier
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.zero_loop import ZeroLoop
from armillary.runtime.cyclic.zero_ring import ZeroRing
from armillary.schedules.clipping import NORMS, Clip
from armillary.schedules.cyclic import cyclic
from armillary.schedules.cyclic_pipeline import cyclic_pipeline
from armillary.schedules.delayed_all_reduce import delayed_all_reduce
from armillary.schedules.messages import home
from armillary.schedules.simultaneous import simultaneous
from armillary.schedules.zero_messages import held_copies, zero_messages
from channels import GlooChannel, in_threads
from ring_truth import DROP, STEPS, Late, bfloat16, has_time, short, truth, without_collectives
from staged_models import (
    EVERY_CLIP,
    LOOSE,
    OPTIMIZERS,
    TIGHT,
    as_stages,
    data,
    drop,
    rings,
    same,
    squared_error,
    stages_of,
    weights,
)


def one_worker(rank, channel, schedule, optimizer="momentum", dtype=torch.float64, drains=(), settles=(), **options):
    """The user's plain loop; returns home stages, losses, buffers, number of states, and weight bytes per action."""
    course = Course(schedule, squared_error, clip=options.pop("clip", None))
    autocast = options.pop("autocast", None)
    model = nn.Sequential(*stages_of(schedule.stages, dtype, **options))
    made = OPTIMIZERS[optimizer](model.parameters())
    run = ZeroLoop(model, as_stages(model), made, course, channel, rank)
    held = watch(run)
    scheduler, losses = drop(made, DROP), []
    with bfloat16(autocast == "everything"):
        for step, batches in enumerate(data(STEPS, schedule.workers, dtype)):
            if step in drains:
                run.drain()
            if step in settles:
                run.settle()
            made.zero_grad()
            inputs, target = batches[rank]
            with bfloat16(autocast is not None):
                loss = squared_error(model(inputs), target)
            loss.backward()
            made.step()
            scheduler.step()
            losses.append(loss.detach())
    run.drain()
    return newest(run), losses, list(model.buffers()), len(made.state), held


def newest(run):
    """Of the stages that are at home here."""
    return {stage: run.ring.flat[stage].unpack_weights(run.ring.home.copy(stage)) for stage in run.ring.home.owned}


def watch(run):
    """Will hold, for every action that is run, the bytes of flat weights that are alive on this worker."""
    ring, found = run.ring, []
    sizes = {stage: sum(flat.nbytes for flat in part.empty_weights()) for stage, part in ring.flat.items()}
    before = ring.before

    def look(action):
        before(action)
        alive = [*ring.tokens(), *(flat for flats in ring.home.flats.values() for flat in flats)]
        weights = {flat.untyped_storage().data_ptr(): flat.nbytes for flat in alive if flat.nbytes in sizes.values()}
        found.append(sum(weights.values()))

    ring.before = look
    return found


def holds(schedule, options, answers):
    """Asserts that homes end where the reference does, and every worker lost and counted what it does."""
    shared = {key: value for key, value in options.items() if key != "settles"}
    final, losses, buffers = truth(schedule, is_whole=True, **shared)
    got = {}
    for worker, (mine, own_losses, own_buffers, states, _) in enumerate(answers):
        assert sorted(mine) == [j for j in range(schedule.stages) if home(schedule, j) == worker]
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
    """In every action of the steady state; what it holds while it settles is counted by nobody."""
    answers = in_threads(schedule.workers, lambda rank, channel: one_worker(rank, channel, schedule, dropout=0.0))
    sizes = [sum(p.nbytes for p in stage.parameters()) for stage in stages_of(schedule.stages)]
    for worker, (*_, held) in enumerate(answers):
        want = [sum(sizes[j] * n for j, n in copies.items()) for copies in held_copies(schedule, worker)]
        assert held[2 * len(want) :] == want * (STEPS - 2), (worker, str(schedule))


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(Courier, "reap", lambda self, tick: None), (ZeroRing, "_forget", lambda self, action: None)],
    ids=["sent and kept", "stepped beyond and kept"],
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
    """The most bytes of weights in any tensor python knows of, between forward and backward: graphs keep none."""
    model = nn.Sequential(*stages_of(schedule.stages, dropout=0.0))
    made = OPTIMIZERS["sgd"](model.parameters())
    run = ZeroLoop(model, as_stages(model), made, Course(schedule, squared_error), GlooChannel(), rank)
    for batches in data(STEPS, world):
        loss = squared_error(model(batches[rank][0]), batches[rank][1])
        blank = all(p.untyped_storage().nbytes() == p.element_size() for p in model[0].parameters())
        loss.backward()
        blank = blank and all(p.grad is None for p in model.parameters())
        made.step()
    gc.collect()
    blank = blank and all(p.untyped_storage().nbytes() == p.element_size() for p in model.parameters())
    run.drain()
    return blank and not list(run.ring.tokens())


def test_between_two_uses_parameters_and_graphs_hold_no_weights_and_after_a_drain_nothing_is_under_way(crew):
    assert crew(2).run(alive_bytes, cyclic(2, 4)) == [True, True]


def test_only_the_schedules_messages_are_sent_and_one_more_a_crossing_token_where_a_step_opens(crew):
    for schedule, clip in product(
        (cyclic(4, slack=2), cyclic(3, 6, slack=1), cyclic(2, slack=2)), (None, EVERY_CLIP[2])
    ):
        replies = crew(4).run(count_messages, schedule, clip)
        for worker in range(schedule.workers):
            want = Counter(m.receiver for m in zero_messages(schedule, clip) if m.sender == worker)
            steps = {peer: STEPS * count for peer, count in want.items()}
            opened = Counter(replies[worker]) - Counter(steps)
            assert not Counter(steps) - Counter(replies[worker])
            assert opened.total() <= 2 * sum(home(schedule, j) == worker for j in range(schedule.stages))


def count_messages(rank, world, schedule, clip):
    if rank >= schedule.workers:
        return None
    channel = GlooChannel()
    one_worker(rank, channel, schedule, clip=clip)
    return [peer for peer, _ in channel.sent]


# Who is late, who looks


@pytest.mark.parametrize("schedule", [*rings(3)[::2], cyclic(5), cyclic(5, 3, 5), cyclic(4, 7, 1)], ids=short)
def test_nothing_depends_on_who_is_late_and_nobody_waits_for_ever(schedule):
    options = {"dropout": 0.0, "settles": (2,), "drains": (3,), "clip": Clip(TIGHT, "previous")}
    answers = in_threads(
        schedule.workers, lambda rank, channel: one_worker(rank, Late(channel, rank), schedule, **options)
    )
    holds(schedule, options, answers)


def look(rank, world, schedule, evaluates):
    model = nn.Sequential(*stages_of(schedule.stages))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    run = ZeroLoop(model, as_stages(model), optimizer, Course(schedule, squared_error), GlooChannel(), rank)
    seen, spread = [], lambda tensor, owner: dist.broadcast(tensor, owner)
    for batches in data(STEPS, world):
        inputs, target = batches[rank]
        squared_error(model(inputs), target).backward()
        optimizer.step()
        if evaluates:
            with run.newest(spread), torch.no_grad():
                model.eval()
                assert model(inputs).isfinite().all()
                seen.append(weights(model))
                model.train()
    run.drain()
    return seen, newest(run)


@pytest.mark.parametrize("schedule", [cyclic(2, 4, slack=2), cyclic(2, 3)], ids=short)
def test_evaluating_the_newest_weights_changes_nothing(crew, schedule):
    looked, plain = (crew(2).run(look, schedule, evaluates) for evaluates in (True, False))
    stages = stages_of(schedule.stages)
    reference = Reference(stages, OPTIMIZERS["momentum"](stages.parameters()), schedule, squared_error)
    for step, batches in enumerate(data(STEPS, 2)):
        reference.step(batches)
        assert all(same(seen[step], weights(stages)) for seen, _ in looked)
    for rank in range(2):
        for stage, mine in plain[rank][1].items():
            assert same(looked[rank][1][stage], mine)


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
        run = ZeroLoop(own, as_stages(own), optimizer, Course(schedule, squared_error), channel, rank)
        for batches in data(STEPS, 2):
            inputs, target = batches[rank]
            squared_error(own(inputs), target).backward()
            optimizer.step()
        run.drain()
        return newest(run)

    got = dict(sorted(pair for answer in in_threads(2, alone) for pair in answer.items()))
    assert same([weight for mine in got.values() for weight in mine], weights(whole))


# What is refused


def alone_in_a_ring(slack=0):
    """A ring of one worker, which needs no channel."""
    model = nn.Sequential(*stages_of(2))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    course = Course(cyclic(1, 2, slack), squared_error)
    return model, optimizer, ZeroLoop(model, as_stages(model), optimizer, course, GlooChannel(), 0)


def test_weights_read_out_of_turn_are_refused_by_name():
    inputs, target = data(1, 1)[0][0]
    model, _, _ = alone_in_a_ring()
    for attempt in (lambda: model.eval()(inputs), lambda: model[1](inputs)):
        with pytest.raises(
            RuntimeError, match=r"worker 0: \w\.0 reads weights of stage \d, which are not here.*newest"
        ):
            attempt()
    assert all(math.isnan(value) for p in model.parameters() for value in p.detach().flatten().tolist())

    model, _, run = alone_in_a_ring()
    loss = squared_error(model(inputs), target)
    with pytest.raises(RuntimeError, match=r"drain between forward and optimizer\.step"):
        run.drain()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"goes once through the stages|a backward without a training forward"):
        loss.backward()

    model, _, run = alone_in_a_ring()
    with pytest.raises(RuntimeError, match="a training forward inside newest"), run.newest(lambda *_: None):
        model(inputs)


def test_what_is_no_ring_is_refused():
    model = nn.Sequential(*stages_of(2))
    optimizer = OPTIMIZERS["sgd"]([*model.parameters(), nn.Parameter(torch.zeros(3))])
    old = dataclasses.replace(cyclic(2), staleness=((2, 1), (2, 0)))
    for course, complaint in (
        (Course(cyclic(3), squared_error), "3 stages and 3 workers; got 2 stages, worker 0"),
        (Course(cyclic_pipeline(2, 2), squared_error), "makes no ring"),
        (Course(old, squared_error), "weights more than one step old"),
        (Course(cyclic(2), squared_error, clip=Clip(1.0)), "wanted at tick 1, and the norm .* known from tick 2"),
        (Course(cyclic(2), squared_error), r"steps 1 parameters of no stage, shapes \[\(3,\)\]"),
    ):
        with pytest.raises(ValueError, match=complaint):
            ZeroLoop(model, as_stages(model), optimizer, course, GlooChannel(), 0)
