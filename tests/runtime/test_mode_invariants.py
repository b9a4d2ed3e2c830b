"""What each mode of the interpreter keeps beside the reference's numbers: what is sent, held and refused."""

import dataclasses
import gc
from collections import Counter
from functools import partial
from itertools import combinations, product

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from armillary.models.preserved_state import LiveBytes
from armillary.plans import Choice
from armillary.reference.versions import Reference
from armillary.schedules import Clip, StageMessage, read
from armillary.schedules.accumulation import accumulation
from armillary.schedules.costs import copies_held, held_copies
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.routes import NORM_BYTES
from armillary.schedules.shared_stages import SharedPlacement, devices_for
from armillary.stages.train_spec import TrainSpec
from armillary.stages.weights import StageWeights, UnshardedStage
from armillary.transport.point_to_point import Mailbox
from channels import Board, GlooChannel, ThreadChannel, in_threads
from modes import MODES, STEPS, Case, handed_in, in_threads_of, reference, train, worker
from schedule_messages import pipeline_messages, ring_messages, shared_messages
from staged_models import EVERY_CLIP, OPTIMIZERS, data, rings, same, squared_error, stages_of, weights

DRY = {"dropout": 0.0}  # threads share one random number generator
FIRST, LAST = 4, 7  # steps whose messages are counted; before them all pairs of ranks have learnt their forms
ITEM_BYTES = torch.empty(3, 5, dtype=torch.float64).nbytes


def one_device(case, **spec):
    """Stages, and the interpreter that has them all."""
    stages = case.stages()
    return stages, worker("one_device", case, 0, None, stages, **spec)[0]


# What is looked at between steps


@pytest.mark.parametrize(
    ("mode", "schedule"),
    [
        ("one_device", cyclic(3, slack=3)), ("ring", cyclic(2, slack=2)), ("zero_ring", cyclic(2, 4, slack=2)),
        ("zero_ring", cyclic(2, 3)), ("pipeline", cyclic_pipeline(3, 3, 1)), ("shared", cyclic(3)),
    ],
)  # fmt: skip
def test_after_settling_a_rank_shows_the_newest_weights_and_training_goes_on_as_if_it_had_not(mode, schedule):
    case = Case(schedule, model=DRY)

    def looked(rank, channel):
        stages, seen = case.stages(), []
        run, _ = worker(mode, case, rank, channel, stages)
        for batches in data(STEPS, schedule.micro_batches):
            run.step(handed_in(mode, batches, rank))
            run.settle()
            seen.append({j: weights(stages[j]) for j in MODES[mode].shows(schedule, rank)})
        run.drain()
        return seen

    stages = case.stages()
    truth = Reference(stages, OPTIMIZERS["momentum"](stages.parameters()), schedule, squared_error)
    looks = in_threads(MODES[mode].ranks(schedule), looked)
    for step, batches in enumerate(data(STEPS, schedule.micro_batches)):
        truth.step(batches)
        for seen in looks:
            assert all(same(own, weights(stages[j])) for j, own in seen[step].items()), step


# Who sends what


def peers(rank, world, mode, schedule, clip, sizes):
    """The receivers of a rank's messages of these sizes (any, if None)."""
    if rank >= MODES[mode].ranks(schedule):
        return None
    channel = GlooChannel()
    train(mode, Case(schedule, clip=clip), rank, channel)
    return Counter(peer for peer, sent_bytes in channel.sent if sizes is None or sent_bytes in sizes)


def test_a_ring_sends_its_schedules_messages_only(crew):
    for schedule, clip in product((cyclic(4, slack=2), cyclic(3, slack=1), cyclic(2, slack=2)), (None, *EVERY_CLIP)):
        replies = crew(4).run(peers, "ring", schedule, clip, None)
        for rank in range(schedule.workers):
            forms = Counter(m.receiver for m in ring_messages(schedule, clip) if m.sender == rank)
            # of each edge once a form, and its length
            assert replies[rank] == Counter({peer: (STEPS + 2) * count for peer, count in forms.items()})


def test_a_pipeline_sends_its_schedules_messages_only_and_one_number_up_and_down_if_it_clips(crew):
    schedule = cyclic_pipeline(3, 3, 3)
    items = crew(4).run(peers, "pipeline", schedule, None, (ITEM_BYTES,))
    clipped, plain = (crew(4).run(peers, "pipeline", schedule, clip, (NORM_BYTES,)) for clip in (Clip(1.0), None))
    for stage in range(3):
        told = [m for m in pipeline_messages(schedule, Clip(1.0)) if m.sender == stage]
        assert items[stage] == Counter([m.receiver for m in told if m.content != "norm"] * STEPS)
        assert clipped[stage] - plain[stage] == Counter([m.receiver for m in told if m.content == "norm"] * STEPS)


def test_under_autocast_activations_cross_a_pipeline_in_bfloat16():
    for autocast, width in (("", 4), ("forward and loss", 2)):
        case = Case(cyclic_pipeline(3, 3), dtype=torch.float32, autocast=autocast, model={"norm": None, **DRY})

        def sizes(rank, channel, case=case):
            train("pipeline", case, rank, channel)
            return [size for peer, what, size in channel.sent if peer == rank + 1 and size in (30, 60)]

        assert in_threads(3, sizes)[1] == [3 * 5 * width] * (STEPS * 3)


def sent_in_training(rank, channel, schedule, clip):
    """What a device sends in steps in which everybody knows the forms: (receiver, bytes) of each message."""
    case, known = Case(schedule, optimizer="sgd", clip=clip, model=DRY), 0
    run, _ = worker("shared", case, rank, channel, case.stages())
    for step, batches in enumerate(data(LAST, schedule.workers)):
        if step == FIRST:
            run.settle()
            known = len(channel.sent)
        run.step(batches)
    run.settle()
    return Counter((peer, sent_bytes) for peer, _, sent_bytes in channel.sent[known:])


@pytest.mark.parametrize("clip", [None, Clip(1.0, "previous")], ids=str)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_shared_devices_send_the_schedules_messages_only_and_as_large(workers, clip):
    schedule = cyclic(workers)
    sharing, stages, expected = SharedPlacement(schedule), stages_of(workers), Counter()
    for step in range(FIRST, LAST):
        for m in shared_messages(sharing, step, clip):
            own = list(stages[m.stage].parameters())
            room = sum(p.nbytes for p in own)
            size = {"weights": room, "norm": NORM_BYTES, "activation": ITEM_BYTES, "activation gradient": ITEM_BYTES}
            expected[m.sender, m.receiver, size.get(m.content, room + 8 * len(own))] += 1
    sent = in_threads(sharing.devices, lambda rank, channel: sent_in_training(rank, channel, schedule, clip))
    assert Counter({(r, *key): count for r, one in enumerate(sent) for key, count in one.items()}) == expected


# What is held


def test_the_activations_held_on_one_device_are_the_schedules_at_every_tick():
    for schedule in [*rings(2)[::2], *rings(3)[1::2], cyclic(4), accumulation(3, 2)]:
        after = {}

        def observe(due, version, held, after=after):
            after[due.tick] = set(held)

        _, run = one_device(Case(schedule), observe=observe)
        for batches in data(STEPS, schedule.micro_batches):
            run.step(batches)
        existing = {due for due in after if due < STEPS * schedule.period}
        assert all(after[tick] == schedule.held_after(tick) for tick in existing) and len(existing) > STEPS


def test_a_stage_of_a_pipeline_holds_no_more_activations_than_the_schedule_says():
    for schedule in (cyclic_pipeline(3, 3), cyclic_pipeline(3, 6, 1), cyclic_pipeline(4, 4, 2)):
        for stage, got in enumerate(in_threads_of("pipeline", Case(schedule, model=DRY))):
            ticks = range(3 * schedule.period)
            most = max(sum(place[2] == stage for place in schedule.held_after(tick)) for tick in ticks)
            assert 0 < got.most_held <= most


def test_shared_devices_act_in_order_and_hold_one_micro_batch_from_its_forward_to_its_backward():
    schedule = cyclic(3, slack=1)
    sharing, case = SharedPlacement(schedule), Case(schedule, model=DRY)

    def alone(rank, channel):
        did, held = [], []

        def observe(due, version, places):
            did.append((due.tick, due.op, due.place))
            held.append(len(places))

        run, _ = worker("shared", case, rank, channel, case.stages(), observe=observe)
        for batches in data(STEPS, 3):
            run.step(batches)
        run.settle()
        return did, held

    for rank, (did, held) in enumerate(in_threads(sharing.devices, alone)):
        places = [(one.kind, (step, one.micro_batch, sharing.stage_of(rank)))
                  for step in range(STEPS) for one in sharing.actions(rank, step)]  # fmt: skip
        assert did == sorted((sharing.start(kind, place), kind, place) for kind, place in places)
        assert held == [1, 0] * (len(did) // 2)


def test_at_most_two_versions_of_a_stage_live_and_one_of_a_stage_that_is_never_stale():
    for slack, most in ((0, [2, 2, 1]), (3, [2, 2, 2])):
        kept = [set(), set(), set()]

        def observe(due, version, held, kept=kept):
            for j, store in run._weights.items():  # noqa: B023
                flying = {flight.version for place, flight in run.activations.items() if place[2] == j}  # noqa: B023
                kept[j].add(len(flying.union(store.versions)))

        _, run = one_device(Case(cyclic(3, slack=slack), optimizer="sgd"), observe=observe)
        for batches in data(4, 3):
            run.step(batches)
        assert [max(counts) for counts in kept] == most


def test_only_a_stage_that_is_read_old_is_copied_for_its_next_version():
    """Of the cyclic schedule at slack 0, the last stage is never read old."""
    stages, run = one_device(Case(cyclic(3), optimizer="sgd"))
    first = [stage[0].weight.data for stage in stages]  # kept, so that no later version can lie in the same place
    for batches in data(4, 3):
        run.step(batches)
    run.settle()
    assert [stage[0].weight.data_ptr() == kept.data_ptr() for stage, kept in zip(stages, first)] == [False, False, True]


def weight_bytes(schedule):
    """By rank of a ring that keeps no weights: those alive at every action; all that the schedule counts in a step."""
    sizes = [sum(p.nbytes for p in stage.parameters()) for stage in stages_of(schedule.stages)]
    case = Case(schedule, model=DRY)

    def alone(rank, channel):
        stages, found = case.stages(), []
        run, _ = worker("zero_ring", case, rank, channel, stages)
        owned = sum(size for j, size in enumerate(sizes) if j not in run.borrowed)

        def before(act):
            def look(one):
                older = [tensor for kept in run._weights.values() for tensor in kept.older()] if run.borrowed else []
                flats = [*run._mailbox.held(), *(flat for kept in run.borrowed.values() for flat in kept.held())]
                alive = {flat.untyped_storage().data_ptr(): flat.nbytes for flat in flats if flat.nbytes in sizes}
                found.append(owned + sum(alive.values()) + sum(tensor.nbytes for tensor in older))
                act(one)

            return look

        run.forward, run.backward = before(run.forward), before(run.backward)
        for batches in data(STEPS, schedule.workers):
            run.step([batches[rank]])
        run.drain()
        return found

    held = in_threads(schedule.workers, alone)
    counted = [[sum(sizes[j] * n for j, n in copies.items()) for copies in held_copies(schedule, worker)]
               for worker in range(schedule.workers)]  # fmt: skip
    return list(zip(held, counted, strict=True))


def test_the_weight_bytes_on_a_worker_of_a_ring_that_keeps_none_are_the_schedules_count():
    """In every action of the steady state, in which the next step is always handed in."""
    for schedule in [cyclic(1), *rings(2)[::2], *rings(3)[::2], cyclic(4, 8), cyclic(5, 7, 2)]:
        for rank, (held, want) in enumerate(weight_bytes(schedule)):
            assert held[3 * len(want) : -len(want)] == want * (STEPS - 4), (rank, str(schedule))


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Mailbox, "over", lambda self, message: [pending.wait() for pending, _ in self._under_way[message]]),
        (UnshardedStage, "let_go", lambda self, message: None),
        (StageWeights, "forget", lambda self, before: None),
    ],
    ids=["sent and kept", "borrowed and kept", "stepped beyond and kept"],
)
def test_weights_kept_instead_of_dropped_are_more_than_the_schedules_count(owner, name, fault, monkeypatch):
    monkeypatch.setattr(owner, name, fault)
    assert any(max(held) > max(counted) for held, counted in weight_bytes(cyclic(3, 6, slack=3)))


def alive_bytes(rank, world, schedule):
    """Whether neither the model's parameters nor the leaves of graphs hold weights that others own."""
    case, blank, graphs = Case(schedule, optimizer="sgd", model=DRY), [], 0
    stages = case.stages()
    run, _ = worker("zero_ring", case, rank, GlooChannel(), stages)

    def look(one, version, held):
        nonlocal graphs
        flights = [flight for (_, _, j), flight in run.activations.items() if j in run.borrowed]
        leaves = [leaf for flight in flights for leaf in flight.reads.weights.values()]
        mine = [p for j in run.borrowed for p in stages[j].parameters()]
        blank.extend(p.untyped_storage().nbytes() == p.element_size() for p in [*leaves, *mine])
        graphs += len(flights)

    run._spec = dataclasses.replace(run._spec, observe=look)
    for batches in data(STEPS, world):
        run.step([batches[rank]])
        blank.append(all(p.grad is None for p in stages.parameters()))
    run.drain()
    gc.collect()
    return all(blank) and graphs > 0 and not list(run.beside())


def test_between_two_uses_parameters_and_graphs_hold_no_weights_and_after_a_drain_nothing_is_under_way(crew):
    assert crew(2).run(alive_bytes, cyclic(2, 4)) == [True, True]


WIDE = 64  # a stage's weights are this many times as large as what it hands on


def copies_alive(rank, channel, schedule):
    """Copies of a stage's weights and gradients, and messages of that size, that are here between two steps."""
    with LiveBytes() as live:
        stages, alive = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(schedule.stages)), []
        whole, one = live.now_bytes, sum(parameter.nbytes for parameter in stages[0].parameters())
        run, _ = worker("shared", Case(schedule, optimizer="sgd"), rank, channel, stages)
        for _ in range(STEPS + 4):
            run.step([(torch.randn(1, WIDE), torch.randn(1, WIDE))] * schedule.micro_batches)
            alive.append((live.now_bytes - whole) / one + 1)
        run.settle()
    return sum(alive[STEPS:]) / 4


@pytest.mark.parametrize(("workers", "slack"), [(2, 0), (3, 0), (3, 1), (4, 1)])
def test_memory_forecast_of_shared_stages_is_what_is_alive(workers, slack):
    schedule, devices = cyclic(workers, slack=slack), devices_for(workers)
    options = read(Choice("shared_stages", {"slack": slack}), devices)
    alive = in_threads(devices, lambda rank, channel: copies_alive(rank, channel, schedule))
    forecast = sum(copies_held(options, stage, devices, 0) for stage in range(workers))
    assert sum(alive) / devices == pytest.approx(forecast, rel=0.1)


def test_no_cast_of_weights_is_kept_beyond_a_stages_forward():
    """Torch would keep every version's casts until the user's autocast ends, which may be around the whole training."""
    _, run = one_device(Case(cyclic(2, slack=2), optimizer="sgd", dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        run.step(data(1, 2, torch.float32)[0])
        read = run._weights[0].read(0, 0, 0)["0.weight"]
        with torch.no_grad():
            read.zero_()
            assert not nn.functional.linear(torch.ones(1, 5), read).any()


def test_random_numbers_outside_the_model_go_on_as_if_it_had_drawn_none():
    _, run = one_device(Case(cyclic(1, 2)))
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    run.step(data(1, 1)[0])
    assert torch.equal(torch.rand(3), want)


def test_the_norms_differ():
    finals = [train("one_device", Case(cyclic(3, slack=1), clip=clip), 0).weights for clip in (None, *EVERY_CLIP)]
    assert not any(same(one[0], other[0]) for one, other in combinations(finals, 2))


def test_a_drain_changes_what_is_read():
    drained, plain = (train("one_device", Case(cyclic(3, slack=1), drains=one), 0).weights for one in ((2,), ()))
    assert not same(drained[0], plain[0])


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

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, value):
        if not value.requires_grad:
            value = value.detach().requires_grad_()
        return checkpoint(self.inner, value, use_reentrant=False, preserve_rng_state=False)


class Fork(nn.Module):
    """Gives a dict with a tuple, a mask and a constant to the next stage."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, value):
        return {"skip": value, "body": (torch.tanh(self.inner(value)), value > 0, 3)}


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, value):
        body, mask, factor = value["body"]
        return self.inner(value["skip"] + factor * body * mask)


def parts(*kinds):
    """Makes stages: a plain one, then one of each kind."""

    def make(dtype):
        stages = nn.ModuleList([stages_of(3, **DRY)[0], *(kind() for kind in kinds)]).to(dtype)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in stages[1:].parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.4)
        return stages

    return make


PLAIN = partial(nn.Linear, 5, 5)
UNUSUAL = {  # what is trained, and what the reference trains: it cannot run a part again, inside backward
    "unused": ((Sometimes, PLAIN), (Sometimes, PLAIN)),
    "again": ((Again, PLAIN), (PLAIN, PLAIN)),
    "no parameters": ((nn.Identity, PLAIN), (nn.Identity, PLAIN)),
    "dicts and constants": ((Fork, Join), (Fork, Join)),
}


@pytest.mark.parametrize("mode", ["one_device", "ring", "zero_ring", "pipeline"])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unused_parameters_recomputation_stages_without_parameters_and_structures_are_the_references(mode, kind):
    if (mode, kind) == ("pipeline", "no parameters"):
        pytest.skip("no optimizer takes no parameters")
    schedule = cyclic_pipeline(3, 3) if mode == "pipeline" else cyclic(2, 3, slack=1)
    mine, plain = (Case(schedule, optimizer="adam", model={"make": parts(*kinds)}) for kinds in UNUSUAL[kind])
    whole, _, _ = reference("one_device", plain)
    for shown in in_threads_of(mode, mine):
        assert all(same(own, weights(whole[j])) for j, own in shown.weights.items())


# What is refused


def test_micro_batches_that_change_their_shape_are_refused_before_they_are_sent():
    channel = ThreadChannel(Board(), rank=0)
    mailbox, messages = Mailbox(channel, torch.device("cpu")), (StageMessage("activation", 0, m, 0) for m in range(4))
    mailbox.send(next(messages), 1, *tree_flatten({"body": torch.zeros(3, 5), "factor": 2}))
    before, plain = len(channel.sent), torch.zeros(3, 5)
    for other in ({"body": torch.zeros(2, 5), "factor": 2}, {"body": plain, "factor": 3}, plain):
        with pytest.raises(
            RuntimeError, match=r"activation of stage 0 for rank 1 changed from .* want micro-batches of one shape"
        ):
            mailbox.send(next(messages), 1, *tree_flatten(other))
    assert len(channel.sent) == before


def test_gradients_that_no_schedule_made_are_refused():
    stages, run = one_device(Case(cyclic(2), optimizer="sgd"))
    stages[0][0].weight.grad = torch.ones_like(stages[0][0].weight)
    with pytest.raises(RuntimeError, match=r"1 parameters of shapes \[\(5, 5\)\] have gradients that no schedule made"):
        run.step(data(1, 2)[0])


@pytest.mark.parametrize(
    ("mode", "rank", "handed", "said"),
    [("one_device", 0, 3, "got 3 micro-batches, want 2"), ("ring", 0, 2, "cyclic got 2 micro-batches, want 1"),
     ("shared", 2, 1, "got 1 micro-batches, want 2")],
)  # fmt: skip
def test_another_number_of_micro_batches_is_refused(mode, rank, handed, said):
    case = Case(cyclic(2), optimizer="sgd")
    run, _ = worker(mode, case, rank, ThreadChannel(Board(), rank), case.stages())
    with pytest.raises(ValueError, match=said):
        run.step(data(1, handed)[0])


OLD = dataclasses.replace(cyclic(2), staleness=((2, 1), (2, 0)))
LATE = "cannot clip by the global norm: micro-batch 0 reads new weights of stage 2"


@pytest.mark.parametrize(
    ("mode", "schedule", "stages", "clip", "said"),
    [
        ("one_device", cyclic(3), 2, None, "3 stages, the model is cut into 2"),
        ("one_device", cyclic(3), 3, Clip(1.0), LATE),
        ("ring", cyclic(3), 2, None, "cyclic has 3 stages, the model is cut into 2"),
        ("ring", cyclic(2), 2, Clip(1.0), "wanted at tick 1, and the norm .* known from tick 2"),
        ("zero_ring", cyclic(3), 2, None, "cyclic has 3 stages, the model is cut into 2"),
        ("zero_ring", OLD, 2, None, "weights more than one step old"),
        ("zero_ring", cyclic(2), 2, Clip(1.0), "wanted at tick 1, and the norm .* known from tick 2"),
        ("pipeline", cyclic_pipeline(2, 2), 3, None, "has 2 stages, the model is cut into 3"),
        ("pipeline", cyclic_pipeline(3, 3), 3, Clip(1.0), LATE),
        ("shared", cyclic(2, 3), 3, None, "as many equal stages as micro-batches"),
        ("shared", cyclic(2), 3, None, "cyclic has 2 stages, the model is cut into 3"),
        ("shared", cyclic(3), 3, Clip(1.0), "cannot clip by the global norm"),
    ],
)
def test_what_does_not_fit_the_mode_is_refused(mode, schedule, stages, clip, said):
    with pytest.raises(ValueError, match=said):
        worker(mode, Case(schedule, optimizer="sgd", clip=clip), 0, ThreadChannel(Board(), 0), stages_of(stages))


def test_a_stage_to_recompute_that_the_schedule_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"cannot recompute stages \[2\]; the schedule has 2"):
        TrainSpec(cyclic(2), squared_error, recompute=frozenset({1, 2}))
