"""A ring of workers, lowered and interpreted: the reference's weights bit for bit, by point-to-point messages alone."""

from collections import Counter
from itertools import cycle, product

import pytest
import torch
from torch import nn

from armillary.reference.versions import Reference
from armillary.schedules import NORMS, Clip
from armillary.schedules.cyclic import cyclic
from armillary.schedules.delayed_all_reduce import delayed_all_reduce
from armillary.schedules.routes import owner_of, ring_messages
from armillary.schedules.simultaneous import simultaneous
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import TrainSpec, in_a_row
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
    return Interpreter(as_stages(model), optimizer, TrainSpec(schedule, squared_error, **spec), seat)


def one_worker(rank, channel, schedule, optimizer="momentum", dtype=torch.float64, drains=(), settles=(), **options):
    """Worker `rank`; returns weights, losses, buffers, versions read, and optimizer states."""
    clip, rule = options.pop("clip", None), options.pop("rule", "gloo")
    autocast, seen = options.pop("autocast", None), {}
    model = nn.Sequential(*stages_of(schedule.stages, dtype, **options))
    made = OPTIMIZERS[optimizer](model.parameters())

    def observe(one, version, held):
        seen.setdefault(one.place, []).append(version)

    run = worker_of(model, made, schedule, channel, rank, clip=clip, observe=observe, rule=rule)
    losses = trained(run, made, rank, dtype, drains, settles, autocast)
    return weights(model), losses, list(model.buffers()), seen, len(made.state)


def holds(schedule, options, answers):
    """Asserts that every worker ends where the reference does, having read what the schedule says."""
    shared = {key: value for key, value in options.items() if key not in ("settles", "rule")}
    final, losses, buffers = truth(schedule, **shared)
    for worker, (got, own_losses, own_buffers, seen, states) in enumerate(answers):
        assert same(got, final), (worker, str(schedule), options)
        assert same(own_losses, [step[worker] for step in losses])
        assert same(own_buffers, [buffer for stage in buffers[worker] for buffer in stage.values()])
        drains = options.get("drains", ())
        assert seen == {place: [schedule.version(place, drains)] * 2 for place in seen}
        assert len(seen) == STEPS * schedule.stages
        mine = [j for j in range(schedule.stages) if owner_of(schedule, j) == worker]
        if options.get("optimizer", "momentum") != "sgd":
            stages = stages_of(schedule.stages, norm=options.get("norm", nn.LayerNorm))
            assert states == sum(len(list(stages[j].parameters())) for j in mine)


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
def test_the_ring_trains_as_the_reference_does_bit_for_bit(crew, dtype):
    compare(crew, [(schedule, {"dtype": dtype}) for n in (1, 2, 3, 4) for schedule in rings(n)])


def test_without_staleness_it_is_synchronous_data_parallelism_in_worker_order(crew):
    compare(crew, [(simultaneous(3, 2), {}), (simultaneous(4, 4), {}), (delayed_all_reduce(3, 2), {})])


def test_every_optimizer_keeps_its_state_at_home_only(crew):
    compare(crew, [(cyclic(3, slack=place % 2), {"optimizer": name}) for place, name in enumerate(OPTIMIZERS)])


def test_drains_settling_and_buffers_per_worker_are_the_references(crew):
    cases = [
        (cyclic(4), {"drains": (1, 4)}),
        (cyclic(4, slack=4), {"drains": (2,), "settles": (4,)}),
        (cyclic(3, 5, slack=1), {"settles": (2, 3), "norm": nn.BatchNorm1d}),
    ]
    compare(crew, cases)


@pytest.mark.parametrize("around", ["forward and loss", "everything"])
def test_under_autocast_the_weights_are_the_references(crew, around):
    """Around everything, torch would go on using its casts of the weights of the first step."""
    half = {"autocast": around, "dtype": torch.float32}
    options = [half, {**half, "norm": None, "drains": (2,)}, {**half, "clip": Clip(TIGHT, "previous"), "settles": (3,)}]
    compare(crew, [(schedule, option) for schedule in (cyclic(3), cyclic(2, 4, 1)) for option in options])


@pytest.mark.parametrize("by", NORMS)
def test_clipping_is_the_references_bit_for_bit(crew, by):
    schedules = [cyclic(1), *rings(2), *rings(3)[1::2], *rings(4)[2:], simultaneous(3, 2), delayed_all_reduce(3, 2)]
    dtypes = cycle((torch.float32, torch.float64))
    allowed = [schedule for schedule in schedules if by != "global" or has_time(schedule)]
    cases = [(schedule, {"clip": Clip(TIGHT, by), "dtype": next(dtypes)}) for schedule in allowed]
    assert len(cases) > 12
    cases += [(cyclic(4, slack=2), {"clip": Clip(LOOSE, by)}), (cyclic(3, 6, 3), {"clip": Clip(LOOSE, by)})]
    compare(crew, cases)


def test_clipping_keeps_to_the_step_through_drains_and_looks(crew):
    options = [{"drains": (2, 4)}, {"settles": (1, 3)}, {"optimizer": "adamw", "drains": (3,), "settles": (4,)}]
    schedules = cyclic(3, slack=1), cyclic(4, 5, slack=4)
    compare(crew, [(s, {**option, "clip": clip}) for s in schedules for option in options for clip in EVERY_CLIP])


def test_only_the_schedules_messages_are_sent(crew):
    for schedule, clip in product((cyclic(4, slack=2), cyclic(3, slack=1), cyclic(2, slack=2)), (None, *EVERY_CLIP)):
        replies = crew(4).run(count_messages, schedule, clip)
        for worker in range(schedule.workers):
            sent = [m for m in ring_messages(schedule, clip) if m.sender == worker]
            forms = Counter(m.receiver for m in sent)  # of each edge once, and its length
            assert Counter(replies[worker]) == Counter({peer: (STEPS + 2) * count for peer, count in forms.items()})


def count_messages(rank, world, schedule, clip):
    if rank >= schedule.workers:
        return None
    channel = GlooChannel()
    one_worker(rank, channel, schedule, clip=clip)
    return [peer for peer, _ in channel.sent]


@pytest.mark.parametrize("clip", EVERY_CLIP, ids=lambda clip: clip.by)
@pytest.mark.parametrize("schedule", [cyclic(5, slack=2), cyclic(4, 7, 4), cyclic(3, 2, 1)], ids=short)
def test_norms_do_not_depend_on_who_is_late_and_nobody_waits_for_ever(schedule, clip):
    options = {"dropout": 0.0, "clip": clip}
    answers = in_threads(
        schedule.workers, lambda rank, channel: one_worker(rank, Late(channel, rank), schedule, **options)
    )
    holds(schedule, options, answers)


@pytest.mark.parametrize("rule", ["gloo", "nccl"])
@pytest.mark.parametrize("schedule", [*rings(3)[::2], cyclic(5), cyclic(5, 3, 5), cyclic(4, 7, 1)], ids=short)
def test_nothing_depends_on_who_is_late_and_nobody_waits_for_ever(schedule, rule):
    options = {"dropout": 0.0, "settles": (2,), "rule": rule}  # threads share one random number generator
    answers = in_threads(
        schedule.workers, lambda rank, channel: one_worker(rank, Late(channel, rank), schedule, **options), rule
    )
    holds(schedule, options, answers)


def test_looking_at_the_newest_weights_changes_nothing():
    schedule = cyclic(2, slack=2)
    finals = []
    for looks in (False, True):

        def alone(rank, channel, looks=looks):
            model = nn.Sequential(*stages_of(2, dropout=0.0))
            run = worker_of(model, OPTIMIZERS["momentum"](model.parameters()), schedule, channel, rank)
            newest = []
            for batches in data(STEPS, 2):
                run.step([batches[rank]])
                if looks:
                    run.settle()
                    newest.append(weights(model))
            run.drain()
            return weights(model), newest

        finals.append(in_threads(2, alone))
    assert same(finals[0][0][0], finals[1][0][0]) and same(finals[1][0][0], finals[1][1][0])
    for rank in range(2):
        assert same(finals[1][rank][1][-1], finals[1][rank][0])

    stages = stages_of(2, dropout=0.0)
    reference = Reference(stages, OPTIMIZERS["momentum"](stages.parameters()), schedule, squared_error)
    for step, batches in enumerate(data(STEPS, 2)):
        reference.step(batches)
        assert same(weights(stages), finals[1][0][1][step])


class Sometimes(nn.Module):
    """Uses one of its layers only for some inputs, another never."""

    def __init__(self):
        super().__init__()
        self.always, self.rarely, self.never = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, value):
        value = self.always(value)
        return self.rarely(value) if value.sum() > 0 else value


def test_parameters_only_some_workers_use_are_the_references():
    schedule = cyclic(2, slack=1)

    def model():
        stages = stages_of(2, dropout=0.0)
        middle = Sometimes().double()
        with torch.no_grad():
            for place, parameter in enumerate(middle.parameters()):
                parameter.fill_(0.1 * (place + 1))
        return nn.Sequential(stages[0], middle)

    truth = model()
    reference = Reference(list(truth), OPTIMIZERS["momentum"](truth.parameters()), schedule, squared_error)
    for batches in data(STEPS, 2):
        reference.step(batches)

    def alone(rank, channel):
        own = model()
        optimizer = OPTIMIZERS["momentum"](own.parameters())
        run = worker_of(own, optimizer, schedule, channel, rank)
        for batches in data(STEPS, 2):
            run.step([batches[rank]])
        run.drain()
        return weights(own)

    for answer in in_threads(2, alone):
        assert same(answer, weights(truth))


def alone_in_a_ring(slack=0):
    """A ring of one worker, which needs no channel."""
    model = nn.Sequential(*stages_of(2))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    return model, worker_of(model, optimizer, cyclic(1, 2, slack), GlooChannel(), 0)


def test_gradients_that_no_schedule_made_are_refused():
    model, run = alone_in_a_ring()
    model[0][0].weight.grad = torch.ones_like(model[0][0].weight)
    with pytest.raises(RuntimeError, match=r"1 parameters of shapes .* have gradients that no schedule made"):
        run.step(data(1, 1)[0])


def test_a_worker_hands_in_its_own_micro_batch_only():
    model = nn.Sequential(*stages_of(2))
    run = worker_of(model, OPTIMIZERS["sgd"](model.parameters()), cyclic(2), GlooChannel(), 0)
    assert run.micro_batches == [0]
    with pytest.raises(ValueError, match="cyclic got 2 micro-batches, want 1"):
        run.step(data(1, 2)[0])


def test_random_numbers_outside_the_model_go_on_as_if_it_had_drawn_none():
    _, run = alone_in_a_ring()
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    run.step(data(1, 1)[0])
    assert torch.equal(torch.rand(3), want)


def test_what_is_no_ring_is_refused():
    model = nn.Sequential(*stages_of(2))
    for schedule, clip, complaint in (
        (cyclic(3), None, "cyclic has 3 stages, the model is cut into 2"),
        (cyclic(2), Clip(1.0), "wanted at tick 1, and the norm .* known from tick 2"),
    ):
        with pytest.raises(ValueError, match=complaint):
            worker_of(model, OPTIMIZERS["sgd"](model.parameters()), schedule, GlooChannel(), 0, clip=clip)
