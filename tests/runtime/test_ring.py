"""A ring of workers: the user's plain loop, equal to the reference bit for bit, by point-to-point messages alone."""

from collections import Counter
from itertools import cycle, product

import pytest
import torch
from torch import nn

from armillary.reference.cyclic import Reference
from armillary.runtime.cut.stages import chain, cut
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.ring_loop import RingLoop
from armillary.schedules.clipping import NORMS, Clip
from armillary.schedules.cyclic import cyclic
from armillary.schedules.cyclic_pipeline import cyclic_pipeline
from armillary.schedules.delayed_all_reduce import delayed_all_reduce
from armillary.schedules.messages import home, ring_messages
from armillary.schedules.simultaneous import simultaneous
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
    """The user's plain loop on worker `rank`; returns weights, losses, buffers, versions read, and optimizer states."""
    course = Course(schedule, squared_error, clip=options.pop("clip", None))
    autocast = options.pop("autocast", None)
    model = nn.Sequential(*stages_of(schedule.stages, dtype, **options))
    made = OPTIMIZERS[optimizer](model.parameters())
    run = RingLoop(model, as_stages(model), made, course, channel, rank)
    scheduler, losses, seen, step = drop(made, DROP), [], {}, 0
    for j, stage in enumerate(model):
        look = lambda *_, j=j: seen.setdefault((step, rank, j), []).append(run.ring.reading[j])  # noqa: E731
        stage.register_forward_pre_hook(look)
        stage[0].weight.register_post_accumulate_grad_hook(look)
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
    return weights(model), losses, list(model.buffers()), seen, len(made.state)


def holds(schedule, options, answers):
    """Asserts that every worker ends where the reference does, having read what the schedule says."""
    shared = {key: value for key, value in options.items() if key != "settles"}
    final, losses, buffers = truth(schedule, **shared)
    for worker, (got, own_losses, own_buffers, seen, states) in enumerate(answers):
        assert same(got, final), (worker, str(schedule), options)
        assert same(own_losses, [step[worker] for step in losses])
        assert same(own_buffers, [buffer for stage in buffers[worker] for buffer in stage.values()])
        drains = options.get("drains", ())
        assert seen == {place: [schedule.version(place, drains)] * 2 for place in seen}
        assert len(seen) == STEPS * schedule.stages
        mine = [j for j in range(schedule.stages) if home(schedule, j) == worker]
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
            want = Counter(m.receiver for m in ring_messages(schedule, clip) if m.sender == worker)
            assert Counter(replies[worker]) == Counter({peer: STEPS * count for peer, count in want.items()})


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


@pytest.mark.parametrize("schedule", [*rings(3), cyclic(5), cyclic(5, 3, 5), cyclic(4, 7, 1)], ids=short)
def test_nothing_depends_on_who_is_late_and_nobody_waits_for_ever(schedule):
    options = {"dropout": 0.0}  # threads share one random number generator
    answers = in_threads(
        schedule.workers, lambda rank, channel: one_worker(rank, Late(channel, rank), schedule, **options)
    )
    holds(schedule, options, answers)


def test_evaluating_the_newest_weights_changes_nothing():
    schedule = cyclic(2, slack=2)
    finals = []
    for evaluate in (False, True):

        def alone(rank, channel, evaluate=evaluate):
            model = nn.Sequential(*stages_of(2, dropout=0.0))
            optimizer = OPTIMIZERS["momentum"](model.parameters())
            run = RingLoop(model, as_stages(model), optimizer, Course(schedule, squared_error), channel, rank)
            newest = []
            for batches in data(STEPS, 2):
                inputs, target = batches[rank]
                squared_error(model(inputs), target).backward()
                optimizer.step()
                if evaluate:
                    with run.newest(), torch.no_grad():
                        model.eval()
                        model(inputs)
                        newest.append(weights(model))
                        model.train()
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
        run = RingLoop(own, as_stages(own), optimizer, Course(schedule, squared_error), channel, rank)
        for batches in data(STEPS, 2):
            inputs, target = batches[rank]
            squared_error(own(inputs), target).backward()
            optimizer.step()
        run.drain()
        return weights(own)

    for answer in in_threads(2, alone):
        assert same(answer, weights(truth))


def test_a_cut_by_path_and_hooks_on_the_users_own_modules_are_enough():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(stages_of(3, dropout=0.0))
            self.head = nn.Linear(5, 5).double()
            with torch.no_grad():
                self.head.weight.fill_(0.1)
                self.head.bias.fill_(0.2)

        def forward(self, value):
            for block in self.blocks:
                value = value + block(value)
            return self.head(value)

    schedule = cyclic(2, 3)

    class Residual(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, value):
            return value + self.block(value)

    truth = Blocks()
    stages = [
        Residual(truth.blocks[0]),
        nn.Sequential(*map(Residual, truth.blocks[1:2])),
        nn.Sequential(Residual(truth.blocks[2]), truth.head),
    ]
    reference = Reference(stages, OPTIMIZERS["momentum"](truth.parameters()), schedule, squared_error)
    for batches in data(STEPS, 2):
        reference.step(batches)

    def alone(rank, channel):
        model = Blocks()
        optimizer = OPTIMIZERS["momentum"](model.named_parameters())
        cut_by_path = cut(model, chain(model, ["blocks", "head"]), [1, 2])
        run = RingLoop(model, cut_by_path, optimizer, Course(schedule, squared_error), channel, rank)
        for batches in data(STEPS, 2):
            inputs, target = batches[rank]
            squared_error(model(inputs), target).backward()
            optimizer.step()
        run.drain()
        return weights(model)

    for answer in in_threads(2, alone):
        assert same(answer, weights(truth))


def alone_in_a_ring(slack=0):
    """A ring of one worker, which needs no channel."""
    model = nn.Sequential(*stages_of(2))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    run = RingLoop(model, as_stages(model), optimizer, Course(cyclic(1, 2, slack), squared_error), GlooChannel(), 0)
    return model, optimizer, run


def test_what_would_go_wrong_silently_is_refused():
    inputs, target = data(1, 1)[0][0]

    model, optimizer, run = alone_in_a_ring()
    with pytest.raises(RuntimeError, match="without a forward in training mode"):
        optimizer.step()

    squared_error(model(inputs), target).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(
        RuntimeError, match=r"were changed after backward \(by clipping.* options clip_norm and clip_by"
    ):
        optimizer.step()

    model, optimizer, run = alone_in_a_ring()
    squared_error(model(inputs), target).backward()
    with pytest.raises(RuntimeError, match="a second training forward"):
        model(inputs)
    with pytest.raises(RuntimeError, match=r"drain between forward and optimizer.step\(\)"):
        run.drain()

    model, optimizer, run = alone_in_a_ring()
    model[0][0].weight.grad = torch.ones_like(model[0][0].weight)
    with pytest.raises(RuntimeError, match="1 parameters have gradients before the forward"):
        model(inputs)


def test_a_grad_scaler_is_refused_by_name_unless_it_is_switched_off():
    inputs, target = data(1, 1)[0][0]
    for enabled, unscales in ((True, False), (True, True), (False, False)):
        model, optimizer, _ = alone_in_a_ring()
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(squared_error(model(inputs), target)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if not enabled:
            scaler.step(optimizer)
            continue
        with pytest.raises(RuntimeError, match=r"ring: the loss was scaled by a GradScaler.*Use bfloat16"):
            scaler.step(optimizer)


def test_random_numbers_outside_the_model_go_on_as_if_it_had_drawn_none():
    model, _, _ = alone_in_a_ring()
    inputs, _ = data(1, 1)[0][0]
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    model(inputs)
    assert torch.equal(torch.rand(3), want)


def test_what_is_no_ring_is_refused():
    model = nn.Sequential(*stages_of(2))
    optimizer = OPTIMIZERS["sgd"]([*model.parameters(), nn.Parameter(torch.zeros(3))])
    for course, complaint in (
        (Course(cyclic(3), squared_error), "3 stages and 3 workers; got 2 stages, worker 0"),
        (Course(cyclic_pipeline(2, 2), squared_error), "makes no ring"),
        (Course(cyclic(2), squared_error, clip=Clip(1.0)), "wanted at tick 1, and the norm .* known from tick 2"),
        (Course(cyclic(2), squared_error), r"steps 1 parameters of no stage, shapes \[\(3,\)\]"),
    ):
        with pytest.raises(ValueError, match=complaint):
            RingLoop(model, as_stages(model), optimizer, course, GlooChannel(), 0)
