"""One process per stage: equal to the reference bit for bit, flush or no flush, within the schedule's memory."""

import random
import time
from collections import Counter
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from armillary.plans import Send
from armillary.reference.versions import Reference
from armillary.schedules import Clip
from armillary.schedules.cyclic_pipeline import cyclic_pipeline
from armillary.schedules.gpipe import gpipe
from armillary.schedules.instructions import Letter
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.schedules.routes import NORM_BYTES, pipeline_messages
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import TrainSpec, in_a_row
from armillary.transport.point_to_point import Mailbox
from channels import Board, GlooChannel, ThreadChannel, in_threads
from staged_models import (
    EVERY_CLIP,
    LOOSE,
    OPTIMIZERS,
    TIGHT,
    as_stages,
    data,
    drop,
    same,
    squared_error,
    stages_of,
    weights,
)

STEPS, DROP = 5, 2


def loop(run, scheduler, schedule, dtype=torch.float64, drains=(), settles=(), autocast=False):
    """The user's loop, with drains or settling before some steps; autocast is around steps only."""
    finished = []
    for step, batches in enumerate(data(STEPS, schedule.micro_batches, dtype)):
        if step in drains:
            finished += run.drain() or []
        if step in settles:
            finished += run.settle()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            finished += run.step(batches)
        scheduler.step()
    return finished


def truth(schedule, optimizer="momentum", dtype=torch.float64, drains=(), clip=None, autocast=False, **options):
    stages = stages_of(schedule.stages, dtype, **options)
    made = OPTIMIZERS[optimizer](stages.parameters())
    reference = Reference(stages, made, schedule, squared_error, clip=clip)
    losses = loop(reference, drop(made, DROP), schedule, dtype, drains, autocast=autocast)
    kept = [[*weights(stage), *stage.buffers()] for stage in stages]
    return kept, losses


def one_stage(rank, channel, schedule, optimizer="momentum", dtype=torch.float64, drains=(), settles=(), **options):
    """Trains stage `rank`; returns its weights and buffers, the losses of each step, and what it was seen to do."""
    recompute, clip = options.pop("recompute", frozenset()), options.pop("clip", None)
    autocast, rule = options.pop("autocast", False), options.pop("rule", "gloo")
    stages = stages_of(schedule.stages, dtype, **options)
    made = OPTIMIZERS[optimizer](stages[rank].parameters())
    seen, most_held = {}, 0

    def observe(due, version, held):
        nonlocal most_held
        seen.setdefault(due.place, []).append(version)
        most_held = max(most_held, len(held))

    spec = TrainSpec(schedule, squared_error, recompute=recompute, clip=clip, observe=observe)
    seat = in_a_row(schedule, rank, channel, one_queue=rule == "nccl")
    run = Interpreter(as_stages(stages), made, spec, seat)
    finished = loop(run, drop(made, DROP), schedule, dtype, drains, settles, autocast)
    finished += run.settle()
    losses = [loss for one in finished for loss in one.losses]
    return [*weights(stages[rank]), *stages[rank].buffers()], losses, seen, most_held


def job(rank, world, cases):
    """Every case (schedule, options) one after the other; processes beyond the last stage rest."""
    return [
        one_stage(rank, GlooChannel(), schedule, **options) if rank < schedule.stages else None
        for schedule, options in cases
    ]


def holds(schedule, options, answers):
    """Asserts that what the processes did is what the reference and the schedule say."""
    shared = {key: value for key, value in options.items() if key not in ("settles", "recompute")}
    kept, losses = truth(schedule, **shared)
    for stage, (got, _, seen, most_held) in enumerate(answers):
        assert same(got, kept[stage]), (stage, str(schedule), options)
        assert len(seen) == STEPS * schedule.micro_batches
        if not shared.get("drains"):
            assert seen == {place: [schedule.version(place)] * 2 for place in seen}
        ticks = range(3 * schedule.period)
        held = max(sum(place[2] == stage for place in schedule.held_after(tick)) for tick in ticks)
        assert most_held <= held, (stage, str(schedule))
    assert same(answers[-1][1], losses)
    assert all(not answer[1] for answer in answers[:-1])


def compare(crew, cases):
    replies = crew(4).run(job, cases)
    for place, (schedule, options) in enumerate(cases):
        holds(schedule, options, [reply[place] for reply in replies[: schedule.stages]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cyclic_pipeline_trains_as_the_reference_does_bit_for_bit(crew, dtype):
    compare(
        crew,
        [
            (cyclic_pipeline(k, m, slack), {"dtype": dtype})
            for k in (1, 2, 3, 4)
            for m in (k - 1, k, 2 * k)
            for slack in (0, 1, m)
            if m > 0
        ],
    )


def test_flush_pipelines_run_on_the_same_runtime(crew):
    compare(crew, [(make(k, m), {}) for make in (gpipe, one_f_one_b) for k, m in ((2, 3), (3, 2), (4, 4))])


def test_drains_settling_recomputation_and_batch_norm_are_the_references(crew):
    schedule = cyclic_pipeline(3, 3, 1)
    options = [
        {"drains": (2, 4)},
        {"settles": (1, 3)},
        {"recompute": frozenset({0, 2})},
        {"norm": nn.BatchNorm1d},
        {"norm": nn.BatchNorm1d, "recompute": frozenset({0, 1, 2})},
        {"optimizer": "adamw"},
        {"optimizer": "adagrad"},
    ]
    compare(crew, [(schedule, option) for option in options])


def test_clipping_is_the_references_bit_for_bit(crew):
    dtypes = cycle((torch.float32, torch.float64))
    cases = [
        (cyclic_pipeline(k, m, slack), {"clip": clip, "dtype": next(dtypes)})
        for k, m, slack in ((1, 2, 0), (2, 1, 1), (2, 4, 1), (3, 2, 2), (4, 4, 3), (4, 3, 3))
        for clip in (Clip(LOOSE, "global"), *EVERY_CLIP)
    ]
    cases += [(cyclic_pipeline(k, m), {"clip": Clip(TIGHT, "previous")}) for k, m in ((2, 1), (4, 3), (3, 6))]
    cases += [(gpipe(3, 2), {"clip": clip}) for clip in EVERY_CLIP]
    compare(crew, cases)


def test_clipping_keeps_to_the_step_through_drains_and_looks(crew):
    options = [{"drains": (2, 4)}, {"settles": (1, 3)}, {"optimizer": "adamw", "drains": (3,), "settles": (4,)}]
    schedule = cyclic_pipeline(3, 3, 2)
    compare(crew, [(schedule, {**option, "clip": clip}) for option in options for clip in EVERY_CLIP])


def test_only_the_schedules_messages_are_sent(crew):
    schedule = cyclic_pipeline(3, 3)
    replies = crew(4).run(count_messages, schedule)
    for stage in range(3):
        steady = [m.receiver for m in pipeline_messages(schedule) if m.sender == stage]
        assert sorted(replies[stage]) == sorted(steady * STEPS)


def test_under_autocast_activations_cross_in_bfloat16_and_the_weights_are_the_references(crew):
    half = {"autocast": True, "dtype": torch.float32}
    options = [
        half,
        {**half, "norm": None},
        {**half, "recompute": frozenset({0, 1}), "drains": (2,), "settles": (3,)},
        {**half, "clip": Clip(TIGHT, "previous"), "norm": nn.BatchNorm1d},
    ]
    compare(crew, [(schedule, option) for schedule in (cyclic_pipeline(3, 2), gpipe(2, 3)) for option in options])
    wide, narrow = (crew(4).run(count_item_bytes, autocast) for autocast in (False, True))
    assert wide[1] == [3 * 5 * 4] * (STEPS * 3) and narrow[1] == [3 * 5 * 2] * (STEPS * 3)


def count_item_bytes(rank, world, autocast):
    """Bytes of the activations that a stage sends up, without their form at the start."""
    if rank > 2:
        return None
    channel, schedule = GlooChannel(), cyclic_pipeline(3, 3)
    one_stage(rank, channel, schedule, dtype=torch.float32, norm=None, autocast=autocast)
    return [sent_bytes for peer, sent_bytes in channel.sent if peer == rank + 1 and sent_bytes in (30, 60)]


def test_one_number_goes_down_and_up_a_clipped_pipeline_in_every_step(crew):
    schedule = cyclic_pipeline(3, 3, 3)
    replies = crew(4).run(count_norms, schedule)
    for stage in range(3):
        norms = [
            m.receiver for m in pipeline_messages(schedule, Clip(1.0)) if m.sender == stage and m.content == "norm"
        ]
        assert sorted(replies[stage]) == sorted(norms * STEPS)


def count_norms(rank, world, schedule):
    """The receivers of this stage's messages of one number in float64, beyond the lengths of forms at the start."""
    if rank >= schedule.stages:
        return None
    sent = []
    for clip in (Clip(1.0), None):
        channel = GlooChannel()
        one_stage(rank, channel, schedule, clip=clip)
        sent.append(Counter(peer for peer, sent_bytes in channel.sent if sent_bytes == NORM_BYTES))
    return list((sent[0] - sent[1]).elements())


def count_messages(rank, world, schedule):
    """The receivers of this stage's messages of numbers (a first one also brings its form along)."""
    if rank >= schedule.stages:
        return None
    channel = GlooChannel()
    one_stage(rank, channel, schedule)
    item = torch.empty(3, 5, dtype=torch.float64).nbytes
    return [peer for peer, sent_bytes in channel.sent if sent_bytes == item]


class Late:
    """A channel whose process dawdles before every send, by its own dice."""

    def __init__(self, channel, rank):
        self.channel, self.dice = channel, random.Random(rank)

    def post(self, message):
        if isinstance(message, Send):
            time.sleep(self.dice.random() * 0.002)
        return self.channel.post(message)


@pytest.mark.parametrize("rule", ["nccl", "gloo"])
@pytest.mark.parametrize(
    "schedule", [cyclic_pipeline(3, 2), cyclic_pipeline(3, 5), gpipe(3, 4), one_f_one_b(3, 4)], ids=lambda s: s.name
)
def test_nothing_depends_on_who_is_late_or_by_which_rule_messages_move(schedule, rule):
    options = {"dropout": 0.0, "settles": (3,)}  # threads share one random number generator
    answers = in_threads(
        3, lambda rank, channel: one_stage(rank, Late(channel, rank), schedule, rule=rule, **options), rule
    )
    holds(schedule, options, answers)


@pytest.mark.parametrize("rule", ["nccl", "gloo"])
@pytest.mark.parametrize("clip", EVERY_CLIP, ids=lambda clip: clip.by)
def test_norms_do_not_depend_on_who_is_late(clip, rule):
    schedule, options = cyclic_pipeline(3, 3, 3), {"dropout": 0.0, "clip": clip}
    answers = in_threads(
        3, lambda rank, channel: one_stage(rank, Late(channel, rank), schedule, rule=rule, **options), rule
    )
    holds(schedule, options, answers)


def test_micro_batches_that_change_their_shape_are_refused_before_they_are_sent():
    channel = ThreadChannel(Board(), rank=0)
    mailbox, letters = Mailbox(channel, torch.device("cpu")), (Letter("activation", 0, m, 0) for m in range(4))
    mailbox.send(next(letters), 1, *tree_flatten({"body": torch.zeros(3, 5), "factor": 2}))
    before = len(channel.sent)
    for other in (
        {"body": torch.zeros(2, 5), "factor": 2},
        {"body": torch.zeros(3, 5), "factor": 3},
        torch.zeros(3, 5),
    ):
        with pytest.raises(
            RuntimeError, match=r"activation of stage 0 for rank 1 changed from .* want micro-batches of one shape"
        ):
            mailbox.send(next(letters), 1, *tree_flatten(other))
    assert len(channel.sent) == before


def test_skip_connections_and_constants_cross_processes():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, value):
            return {"skip": value, "body": (self.inner(value), value > 0, 3)}

    class Join(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5)

        def forward(self, value):
            body, mask, factor = value["body"]
            return self.inner(value["skip"] + factor * body * mask)

    def model():
        torch.manual_seed(0)
        return nn.ModuleList([nn.Linear(5, 5), Fork(), Join()]).double()

    schedule, results = cyclic_pipeline(3, 3), []
    stages = model()
    reference = Reference(stages, OPTIMIZERS["adam"](stages.parameters()), schedule, squared_error)
    for batches in data(STEPS, 3):
        reference.step(batches)
    results.append(weights(stages))

    def alone(rank, channel):
        torch.manual_seed(0)
        stages = shared[rank]
        run = Interpreter(
            as_stages(stages),
            OPTIMIZERS["adam"](stages[rank].parameters()),
            TrainSpec(schedule, squared_error),
            in_a_row(schedule, rank, channel),
        )
        for batches in data(STEPS, 3):
            run.step(batches)
        run.settle()
        return weights(stages[rank])

    shared = [model() for _ in range(3)]
    results.append([weight for stage in in_threads(3, alone) for weight in stage])
    assert same(*results)


def test_pipeline_and_one_device_agree_on_the_same_schedule():
    schedule = cyclic_pipeline(2, 3)
    stages = stages_of(2, dropout=0.0)
    optimizer = OPTIMIZERS["momentum"](stages.parameters())
    run = Interpreter(as_stages(stages), optimizer, TrainSpec(schedule, squared_error))
    loop(run, drop(optimizer, DROP), schedule)
    run.settle()
    answers = in_threads(2, lambda rank, channel: one_stage(rank, channel, schedule, dropout=0.0))
    assert same([w for got, *_ in answers for w in got], weights(stages))


def test_what_is_no_pipeline_is_refused():
    stages = stages_of(3)
    optimizer = OPTIMIZERS["sgd"](stages.parameters())

    def made(schedule, clip=None):
        spec = TrainSpec(schedule, squared_error, clip=clip)
        return Interpreter(as_stages(stages), optimizer, spec, in_a_row(schedule, 0, GlooChannel()))

    with pytest.raises(ValueError, match="has 2 stages, the model is cut into 3"):
        made(cyclic_pipeline(2, 2))
    with pytest.raises(ValueError, match="cannot clip by the global norm: micro-batch 0 reads new weights of stage 2"):
        made(cyclic_pipeline(3, 3), Clip(1.0))
