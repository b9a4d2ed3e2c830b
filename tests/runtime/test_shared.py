"""N(N+1)/2 devices that micro-batches share: the reference bit for bit, one micro-batch a device, no collective."""

import random
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from armillary.models.untouched import LiveBytes
from armillary.plans import Choice, Send
from armillary.reference.versions import Reference
from armillary.schedules import Clip, read
from armillary.schedules.cyclic import cyclic
from armillary.schedules.routes import NORM_BYTES
from armillary.schedules.shared_stages import Sharing, devices_for, shared_messages
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import Seat, TrainSpec
from channels import GlooChannel, ThreadChannel, in_threads
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
FIRST, LAST = 4, 7  # the steps whose messages are counted; before them all pairs of devices have learnt their forms
COLLECTIVES = ("all_reduce", "broadcast", "all_gather_object", "all_to_all_single", "barrier")


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
    return [weights(stage) for stage in stages], [list(stage.buffers()) for stage in stages], losses


def shared(stages, optimizer, spec, channel, rank, rule="gloo"):
    seat = Seat(rank, Sharing(spec.schedule), channel, one_queue=rule == "nccl")
    return Interpreter(as_stages(stages), optimizer, spec, seat)


def one_device(rank, channel, schedule, optimizer="momentum", dtype=torch.float64, drains=(), settles=(), **options):
    """Trains on device `rank`; returns its stage's weights and buffers, losses, what it was seen to do, its states."""
    recompute, clip = options.pop("recompute", frozenset()), options.pop("clip", None)
    rule = options.pop("rule", "gloo")
    autocast = options.pop("autocast", False)
    stages = stages_of(schedule.stages, dtype, **options)
    made = OPTIMIZERS[optimizer](stages.parameters())
    seen, held = [], []

    def observe(due, version, places):
        seen.append((due.tick, due.op, due.place, version))
        held.append(len(places))

    spec = TrainSpec(schedule, squared_error, recompute=recompute, clip=clip, observe=observe)
    run = shared(stages, made, spec, channel, rank, rule)
    finished = loop(run, drop(made, DROP), schedule, dtype, drains, settles, autocast)
    finished += run.settle()
    mine = stages[Sharing(schedule).stage_of(rank)]
    return weights(mine), list(mine.buffers()), [x for one in finished for x in one.losses], seen, held, len(made.state)


def job(rank, world, cases):
    """Every case one after the other; processes beyond the last device rest. A collective in the loop would raise."""
    kept = {name: getattr(dist, name) for name in COLLECTIVES}
    for name in COLLECTIVES:
        setattr(dist, name, refuse)
    try:
        return [
            one_device(rank, GlooChannel(), schedule, **options) if rank < devices_for(schedule.workers) else None
            for schedule, options in cases
        ]
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def refuse(*args, **kwargs):
    raise AssertionError("a collective was called inside the training loop")


def holds(schedule, options, answers):
    """Asserts that what the devices did is what the reference and the schedule say."""
    said = {key: value for key, value in options.items() if key not in ("settles", "recompute")}
    final, buffers, losses = truth(schedule, **said)
    sharing, drains = Sharing(schedule), options.get("drains", ())
    for rank, (got, own_buffers, own_losses, seen, held, states) in enumerate(answers):
        stage = sharing.stage_of(rank)
        assert same(got, final[stage]), (rank, str(schedule), options)
        if rank == sharing.last(STEPS - 1, stage):
            assert same(own_buffers, buffers[stage])
        assert same(own_losses, losses if stage == schedule.stages - 1 else [])
        done = [action for step in range(STEPS) for action in sharing.actions(rank, step)]
        planned = [
            (sharing.start(kind, place), kind, place, schedule.version(place, drains))
            for step in range(STEPS)
            for action in sharing.actions(rank, step)
            for kind, place in [(action.kind, (step, action.micro_batch, stage))]
        ]
        assert seen == sorted(planned) and len(seen) == len(done)
        assert held == [1, 0] * (len(seen) // 2)  # the activations of one micro-batch from F to B, and none after
        if options.get("optimizer", "momentum") != "sgd":
            assert states == (len(final[stage]) if rank == sharing.owner(stage) else 0)


def compare(crew, cases):
    replies = crew(6).run(job, cases)
    for place, (schedule, options) in enumerate(cases):
        holds(schedule, options, [reply[place] for reply in replies[: devices_for(schedule.workers)]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shared_devices_train_as_the_reference_does_bit_for_bit(crew, dtype):
    """Momentum, weight decay and a rate that drops; slack 0, 1 and N."""
    compare(crew, [(cyclic(n, slack=slack), {"dtype": dtype}) for n in (1, 2, 3) for slack in sorted({0, 1, n})])


def test_drains_settling_recomputation_and_optimizers_are_the_references(crew):
    options = [
        {"drains": (2, 4)},
        {"settles": (1, 3)},
        {"drains": (3,), "settles": (1, 2)},
        {"recompute": frozenset({0, 2})},
        {"optimizer": "adamw"},
        {"optimizer": "adagrad", "drains": (1,)},
    ]
    compare(crew, [(cyclic(3, slack=place % 2), option) for place, option in enumerate(options)])


def test_running_statistics_go_on_from_device_to_device_in_micro_batch_order(crew):
    options = [{}, {"drains": (2, 4)}, {"settles": (1, 3)}, {"recompute": frozenset({0, 1})}, {"dtype": torch.float32}]
    cases = [(cyclic(3, slack=1), {"norm": nn.BatchNorm1d, **option}) for option in options]
    compare(crew, [*cases, (cyclic(2), {"norm": nn.BatchNorm1d, "settles": (2,)})])


class FromFirst(nn.Module):
    """Sets its offset by the first value it ever sees; later forwards only read it."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("offset", torch.zeros(width))
        self.register_buffer("is_set", torch.zeros(()))

    def forward(self, value):
        if not self.is_set:
            self.offset.copy_(value.detach().mean(0))
            self.is_set.fill_(1.0)
        return value - self.offset


def test_a_buffer_that_only_the_first_micro_batch_writes_reaches_every_device(crew):
    compare(crew, [(cyclic(3, slack=slack), {"norm": FromFirst, "drains": (2,)}) for slack in (0, 1)])


def test_clipping_is_the_references_bit_for_bit(crew):
    cases = [(cyclic(n, slack=n), {"clip": Clip(LOOSE)}) for n in (1, 2)]
    cases += [(cyclic(3, slack=1), {"clip": clip, "dtype": torch.float32}) for clip in EVERY_CLIP]
    cases += [(cyclic(n), {"clip": Clip(TIGHT, by)}) for n in (2, 3) for by in ("stage", "previous")]
    compare(crew, cases)


def test_clipping_keeps_to_the_step_through_drains_and_looks(crew):
    options = [{"drains": (2,), "settles": (1,)}, {"optimizer": "adamw", "drains": (3,), "settles": (4,)}]
    compare(crew, [(cyclic(3, slack=3), {**option, "clip": clip}) for option in options for clip in EVERY_CLIP])


def test_under_autocast_the_weights_are_the_references(crew):
    half = {"autocast": True, "dtype": torch.float32}
    options = [half, {**half, "norm": None, "settles": (3,)}, {**half, "recompute": frozenset({0, 1}), "drains": (2,)}]
    compare(crew, [(cyclic(3, slack=1), option) for option in options])


def sent_in_training(rank, channel, schedule, clip):
    """What a device sends in steps in which everybody knows the forms: (receiver, bytes) of each message."""
    stages = stages_of(schedule.stages, dropout=0.0)
    spec = TrainSpec(schedule, squared_error, clip=clip)
    run = shared(stages, OPTIMIZERS["sgd"](stages.parameters()), spec, channel, rank)
    batches, known = data(LAST, schedule.workers), 0
    for step, one in enumerate(batches):
        if step == FIRST:
            run.settle()
            known = len(channel.sent)
        run.step(one)
    run.settle()
    return [(peer, sent_bytes) for peer, _, sent_bytes in channel.sent[known:]]


@pytest.mark.parametrize("clip", [None, Clip(1.0, "previous")], ids=str)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_only_the_schedules_messages_are_sent_and_as_large(workers, clip):
    schedule = cyclic(workers)
    sharing = Sharing(schedule)
    answers = in_threads(sharing.devices, lambda rank, channel: sent_in_training(rank, channel, schedule, clip))
    stages = stages_of(workers)
    item = torch.empty(3, 5, dtype=torch.float64).nbytes
    for rank, sent in enumerate(answers):
        expected = Counter()
        for step in range(FIRST, LAST):
            for m in shared_messages(sharing, step, clip):
                own = list(stages[m.stage].parameters())
                room = sum(p.nbytes for p in own)
                size = {"weights": room, "norm": NORM_BYTES, "activation": item, "activation gradient": item}
                if m.sender == rank:
                    expected[m.receiver, size.get(m.content, room + 8 * len(own))] += 1
        assert Counter(sent) == expected


class Late:
    """A channel whose process dawdles before every send, by its own dice."""

    def __init__(self, channel, rank):
        self.channel, self.dice = channel, random.Random(rank)

    def post(self, message):
        if isinstance(message, Send):
            time.sleep(self.dice.random() * 0.002)
        return self.channel.post(message)


@pytest.mark.parametrize("clip", [None, *EVERY_CLIP], ids=str)
def test_nothing_depends_on_who_is_late(clip):
    """Four workers on ten devices, in threads; one of them is very late with everything."""
    schedule, options = cyclic(4, slack=2), {"dropout": 0.0, "clip": clip, "norm": nn.BatchNorm1d, "settles": (3,)}
    answers = in_threads(10, lambda rank, channel: one_device(rank, Late(channel, rank), schedule, **options))
    holds(schedule, options, answers)


@pytest.mark.parametrize("clip", [None, Clip(TIGHT, "previous"), Clip(LOOSE)], ids=str)
def test_messages_in_one_queue_per_pair_as_nccl_has_them_do_not_hang(clip):
    schedule = cyclic(3, slack=1)
    options = {"dropout": 0.0, "clip": clip, "norm": nn.BatchNorm1d, "settles": (2,), "drains": (3,)}

    def late(rank, channel):
        return one_device(rank, Late(channel, rank), schedule, **options, rule="nccl")

    holds(schedule, options, in_threads(6, late, rule="nccl"))


def test_devices_of_a_stage_agree_at_every_look():
    schedule = cyclic(3)
    sharing = Sharing(schedule)

    def alone(rank, channel):
        stages = stages_of(3, dropout=0.0)
        optimizer = OPTIMIZERS["momentum"](stages.parameters())
        run, index = (
            shared(stages, optimizer, TrainSpec(schedule, squared_error), channel, rank),
            sharing.stage_of(rank),
        )
        looks = []
        for batches in data(STEPS, 3):
            run.step(batches)
            run.settle()
            looks.append(weights(stages[index]))
        return index, looks

    answers = in_threads(6, alone)
    for stage, looks in answers:
        first = next(own for index, own in answers if index == stage)
        assert all(same(mine, theirs) for mine, theirs in zip(looks, first, strict=True))


def test_what_cannot_be_shared_is_refused():
    stages = stages_of(3)
    channel, optimizer = ThreadChannel(None, 0), OPTIMIZERS["sgd"](stages.parameters())
    with pytest.raises(ValueError, match="as many equal stages as micro-batches"):
        shared(stages, optimizer, TrainSpec(cyclic(2, 3), squared_error), channel, 0)
    with pytest.raises(ValueError, match="cyclic has 2 stages, the model is cut into 3"):
        shared(stages, optimizer, TrainSpec(cyclic(2), squared_error), channel, 0)
    with pytest.raises(ValueError, match="cannot clip by the global norm"):
        shared(stages, optimizer, TrainSpec(cyclic(3), squared_error, clip=Clip(1.0)), channel, 0)
    run = shared(stages, optimizer, TrainSpec(cyclic(3), squared_error), channel, 2)
    with pytest.raises(ValueError, match="got 2 micro-batches, want 3"):
        run.step(data(1, 2)[0])


WIDE = 64  # a stage's weights are this many times as large as what it hands on


def copies_alive(rank, channel, schedule):
    """Copies of a stage's weights and gradients, and letters of that size, that are here between two steps."""
    with LiveBytes() as live:
        stages = [nn.Linear(WIDE, WIDE) for _ in range(schedule.stages)]
        whole, one = live.now_bytes, sum(parameter.nbytes for parameter in stages[0].parameters())
        made = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.01)
        run, alive = shared(nn.Sequential(*stages), made, TrainSpec(schedule, squared_error), channel, rank), []
        for _ in range(STEPS + 4):
            run.step([(torch.randn(1, WIDE), torch.randn(1, WIDE))] * schedule.micro_batches)
            alive.append((live.now_bytes - whole) / one + 1)
        run.settle()
    return sum(alive[STEPS:]) / 4


@pytest.mark.parametrize(("workers", "slack"), [(2, 0), (3, 0), (3, 1), (4, 1)])
def test_memory_forecast_is_what_is_alive(workers, slack):
    schedule = cyclic(workers, slack=slack)
    devices = devices_for(workers)
    options = read(Choice("shared_stages", {"slack": slack}), devices)
    alive = in_threads(devices, lambda rank, channel: copies_alive(rank, channel, schedule))
    forecast = sum(options.method.copies(options, stage, devices, 0) for stage in range(workers))
    assert sum(alive) / devices == pytest.approx(forecast, rel=0.1)
