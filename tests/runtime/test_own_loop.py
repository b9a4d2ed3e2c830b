"""The user's own loop, one step late: equal to the reference, gradients under way a whole step."""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from armillary.exchanges import RankInfo, build_dense
from armillary.reference.versions import Reference
from armillary.runtime.dense_unit import dense_unit
from armillary.schedules.delayed_all_reduce import delayed_all_reduce
from armillary.schedules.random_streams import seeded
from armillary.session.delayed_loop import OwnLoop
from armillary.stages.train_spec import StageReplicas
from armillary.transport.transport import Transport
from at_a_table import Table, at_a_table
from staged_models import OPTIMIZERS, WIDTH, data, drop, same, squared_error, stages_of, weights

STEPS, DROP, CPU = 6, 2, torch.device("cpu")
CLIP = 0.05  # below every gradient's norm here


def clip(parameters, norm=CLIP):
    """For a hook, which must answer nothing."""
    clip_grad_norm_(parameters, norm)


def make(dtype=torch.float64, dropout=0.2, **options):
    return nn.Sequential(*stages_of(2, dtype, dropout=dropout, **options))


def truth(workers, optimizer="momentum", drains=(), clips=False, model=make, **options):
    """Weights after every step (with all gradients so far applied), losses [step][worker], buffers by worker."""
    net = model(**options)
    made = OPTIMIZERS[optimizer](net.parameters())
    if clips:
        made.register_step_pre_hook(lambda *_: clip(net.parameters()))
    schedule = delayed_all_reduce(workers)
    reference = Reference([net], made, schedule, squared_error, copies=range(workers))
    scheduler, seen, losses = drop(made, DROP), [], []
    for step, batches in enumerate(data(STEPS, workers, options.get("dtype", torch.float64))):
        if step in drains:
            reference.drain()
        losses.append(reference.step(batches))
        scheduler.step()
        seen.append(weights(net))
    return seen, losses, reference.buffers


def attached(buckets, optimizer, requests, place, **more):
    units = [
        dense_unit(name, {str(n): one for n, one in enumerate(members)}, build_dense("all_reduce"), place)
        for name, members in buckets.items()
    ]
    return OwnLoop(StageReplicas(place, requests, groups={0: units}).reducer(0, is_late=True), optimizer, **more)


def clipping(net):
    """As `clip` does to what is in `.grad`."""

    def change(means):
        for parameter, mean in means.items():
            parameter.grad = mean.clone()
        clip(net.parameters())
        changed = {parameter: parameter.grad for parameter in means}
        for parameter in means:
            parameter.grad = None
        return changed

    return change


def buckets_of(net):
    """In the order in which gradients arrive; none has all of a layer."""
    parameters = list(net.parameters())[::-1]
    return {f"bucket {place}": parameters[place : place + 3] for place in range(0, len(parameters), 3)}


def one_worker(rank, requests, workers, optimizer="momentum", **wishes):
    """The user's plain loop; weights in a look after every step, at the end, losses, buffers."""
    drains, settles, looks, clips = (wishes.pop(name, ()) for name in ("drains", "settles", "looks", "clips"))
    net = wishes.pop("model", make)(**wishes)
    made = OPTIMIZERS[optimizer](net.parameters())
    run = attached(
        buckets_of(net), made, requests, RankInfo(rank, workers), **({"change": clipping(net)} if clips else {})
    )
    scheduler, losses, seen = drop(made, DROP), [], {}
    for step, batches in enumerate(data(STEPS, workers, wishes.get("dtype", torch.float64))):
        if step in drains:
            run.drain()
        if step in settles:
            run.settle()
        inputs, target = batches[rank]
        with seeded(0, (step, rank, 0), CPU):
            loss = squared_error(net(inputs), target)
        loss.backward()
        made.step()
        scheduler.step()
        losses.append(loss.detach())
        if step in looks:
            with run.newest():
                seen[step] = weights(net)
    run.drain()
    return seen, weights(net), losses, list(net.buffers())


def far(these, those):
    """The largest difference of a tensor, relative to its norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(these, those, strict=True))


def holds(workers, wishes, answers, tolerance=0.0):
    shared = {name: value for name, value in wishes.items() if name not in ("settles", "looks")}
    after, losses, buffers = truth(workers, **shared | ({"clips": True} if "clips" in wishes else {}))
    for rank, (seen, final, own_losses, own_buffers) in enumerate(answers):
        compare = same if tolerance == 0.0 else (lambda these, those: far(these, those) <= tolerance)
        assert compare(final, after[-1]), (rank, wishes)
        assert all(compare(seen[step], after[step]) for step in seen) and set(seen) == set(wishes.get("looks", ()))
        if tolerance == 0.0:
            assert same(own_losses, [step[rank] for step in losses])
            assert same(own_buffers, [buffer for stage in buffers[rank] for buffer in stage.values()])


def job(rank, world, cases):
    found = []
    for wishes in cases:
        transport = Transport(check_order=True)
        found.append(one_worker(rank, transport, world, **wishes))
        transport.close()
    return found


CASES = [
    *({"optimizer": name} for name in OPTIMIZERS),
    {"dtype": torch.float32},
    {"norm": nn.BatchNorm1d, "drains": (1, 4)},
    {"optimizer": "adamw", "settles": (2, 3), "looks": (0, 1, 3, 5)},
    {"drains": (3,), "looks": (0, 2, 3, 5), "clips": True},
]


@pytest.mark.parametrize("workers", [1, 2])
def test_one_and_two_workers_train_as_the_reference_does_bit_for_bit(crew, workers):
    replies = crew(workers).run(job, CASES)
    for place, wishes in enumerate(CASES):
        holds(workers, wishes, [reply[place] for reply in replies])


def test_more_workers_differ_by_the_order_of_summing_only(crew):
    """gloo's own order: compared to rounding."""
    cases = [{"optimizer": "momentum", "looks": (2,)}, {"optimizer": "adamw", "drains": (3,), "clips": True}]
    for workers in (3, 4):
        replies = crew(workers).run(job, cases)
        for place, wishes in enumerate(cases):
            holds(workers, wishes, [reply[place] for reply in replies], tolerance=1e-10)


@pytest.mark.parametrize("workers", [2, 4])
def test_summed_in_worker_order_it_is_bit_for_bit_whoever_is_late(workers):
    wishes = {"dropout": 0.0, "drains": (3,)}  # threads share one random number generator
    holds(workers, wishes, at_a_table(workers, lambda rank, seat: one_worker(rank, seat, workers, **wishes)))


class Sometimes(nn.Module):
    """Uses one of its layers only for some inputs, another never, in buckets with others."""

    def __init__(self):
        super().__init__()
        self.always, self.rarely, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                parameter.fill_(0.1 * (place + 1))

    def forward(self, value):
        value, positive = self.always(value), value.sum() > 0
        return self.rarely(value) if positive else value


def test_parameters_that_some_use_count_as_zero_elsewhere_and_those_nobody_uses_stay():
    wishes = {"model": lambda: Sometimes().double()}
    assert {bool(batch[0].sum() > 0) for step in data(STEPS, 2) for batch in step} == {True, False}
    holds(2, wishes, at_a_table(2, lambda rank, seat: one_worker(rank, seat, 2, **wishes)))


def test_a_rank_whose_backward_touches_nothing_joins_with_zeros():
    def act(rank, seat):
        layer, other = nn.Linear(1, 1, bias=False).double(), nn.Parameter(torch.zeros(()).double())
        with torch.no_grad():
            layer.weight.fill_(1.0)
        optimizer = OPTIMIZERS["sgd"](layer.parameters())
        run = attached({"all": [layer.weight]}, optimizer, seat, RankInfo(rank, 2))
        for _ in range(2):
            (other * 2 if rank else layer(torch.ones(1, 1).double()).sum()).backward()
            optimizer.step()
        run.drain()
        return layer.weight.item()

    assert at_a_table(2, act) == [pytest.approx(1 - 2 * 0.1 * 0.5, rel=1e-14)] * 2


def test_buckets_leave_in_one_order_whatever_order_gradients_appear_in():
    """Each rank goes through the two layers the other way round; the table refuses ranks out of order."""

    def act(rank, seat):
        layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
        for layer in layers:
            nn.init.eye_(layer.weight)
        optimizer = OPTIMIZERS["sgd"](p for layer in layers for p in layer.parameters())
        buckets = {str(place): list(layer.parameters()) for place, layer in enumerate(layers)}
        run = attached(buckets, optimizer, seat, RankInfo(rank, 2))
        first, last = layers if rank else layers[::-1]
        for _ in range(2):
            last(first(torch.ones(1, WIDTH).double())).sum().backward()
            optimizer.step()
        run.drain()
        return [label for what, label in seat.events if what == "sent"]

    assert at_a_table(2, act) == [["0", "1"] * 2] * 2


def alone(**options):
    net = make(dropout=0.0)
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    seat = Table(1).of(0)
    return net, optimizer, seat, attached(buckets_of(net), optimizer, seat, RankInfo(0, 1), **options)


def test_groups_are_under_way_until_the_end_of_the_next_backward():
    net, optimizer, seat, _ = alone()
    names = list(buckets_of(net))
    (first, second), *_ = data(1, 2)
    squared_error(net(first[0]), first[1]).backward()
    assert seat.events == [("sent", name) for name in names]
    optimizer.step()
    loss = squared_error(net(second[0]), second[1])
    assert len(seat.events) == len(names)  # nothing was waited for so far
    loss.backward()
    assert seat.events[len(names) :] == [(what, name) for what in ("sent", "waited") for name in names]


def test_grad_after_backward_is_the_mean_of_the_step_before():
    def act(rank, seat):
        net = make(dropout=0.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        attached(buckets_of(net), optimizer, seat, RankInfo(rank, 2))
        shown = []
        for batches in data(3, 2):
            squared_error(net(batches[rank][0]), batches[rank][1]).backward()
            shown.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
            optimizer.step()
        return shown

    net = make(dropout=0.0)
    means = []
    for batches in data(3, 2):
        found = [torch.autograd.grad(squared_error(net(x), y), list(net.parameters())) for x, y in batches]
        means.append([(a + b) / 2 for a, b in zip(*found)])
    for first, second, third in at_a_table(2, act):
        assert set(first) == {None} and same(second, means[0]) and same(third, means[1])


def test_a_change_of_the_gradients_in_the_loop_is_refused_as_the_last_ones_could_not_have_it():
    for change in (
        lambda p: p.grad.mul_(0.5),
        lambda p: setattr(p, "grad", p.grad * 0.5),
        lambda p: setattr(p, "grad", None),
    ):
        net, optimizer, _, _ = alone()
        inputs, target = data(1, 1)[0][0]
        for step in range(2):
            squared_error(net(inputs), target).backward()
            if step:
                change(next(net.parameters()))
                with pytest.raises(RuntimeError, match="clip by the plan: its schedule's clip_norm"):
                    optimizer.step()
            else:
                optimizer.step()


def test_a_learning_rate_set_between_steps_belongs_to_the_gradients_made_after_it():
    net, optimizer, _, run = alone()
    inputs, target = data(1, 1)[0][0]
    rates = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    for rate in (0.5, 0.25, 0.125):
        optimizer.param_groups[0]["lr"] = rate
        squared_error(net(inputs), target).backward()
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == rate
    run.drain()
    assert rates[1:] == [0.5, 0.25, 0.125] and optimizer.param_groups[0]["lr"] == 0.125


def test_what_would_go_wrong_silently_is_refused():
    inputs, target = data(1, 1)[0][0]

    def backward(net):
        squared_error(net(inputs), target).backward()

    net, optimizer, _, run = alone()
    backward(net)
    for act in (run.settle, run.drain, lambda: run.newest().__enter__()):
        with pytest.raises(RuntimeError, match=r"between backward and optimizer.step\(\)"):
            act()
    with pytest.raises(RuntimeError, match="a second backward before"):
        backward(net)

    net, optimizer, _, _ = alone()
    net[0][0].weight.grad = torch.ones_like(net[0][0].weight)
    with pytest.raises(RuntimeError, match=r"1 parameters of shapes .* had gradients before backward"):
        backward(net)

    net, optimizer, _, _ = alone()
    with pytest.raises(RuntimeError, match="call backward before, and step without"):
        optimizer.step(lambda: backward(net))

    net, optimizer, seat, _ = alone()
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"steps 1 parameters of no group, of shapes \[\(3,\)\]"):
        attached(buckets_of(net), OPTIMIZERS["sgd"]([*net.parameters(), stranger]), seat, RankInfo(0, 1))
    optimizer.add_param_group({"params": [stranger]})
    backward(net)
    stranger.sum().backward()
    with pytest.raises(ValueError, match="steps 1 parameters of no group"):
        optimizer.step()

    net, optimizer, _, _ = alone()
    net[0][0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(net)
    with pytest.raises(RuntimeError, match="a backward ended in an error"):
        optimizer.step()


def test_detached_it_is_the_users_own_loop_again():
    net, optimizer, seat, run = alone()
    run.hooks.close()
    plain = make(dropout=0.0)
    own = OPTIMIZERS["momentum"](plain.parameters())
    inputs, target = data(1, 1)[0][0]
    for model, steps in ((net, optimizer), (plain, own)):
        squared_error(model(inputs), target).backward()
        steps.step()
    assert same(weights(net), weights(plain)) and not seat.events
