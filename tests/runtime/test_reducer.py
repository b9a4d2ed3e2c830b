"""Means over replicas: bit for bit the truth; every group leaves from inside the backward, in one order on all."""

import pytest
import torch
from torch import nn

from armillary.exchanges import RankInfo, build_dense
from armillary.reference.versions import WorkersReference
from armillary.runtime.dense_unit import dense_unit
from armillary.schedules import Clip
from armillary.schedules.accumulation import accumulation
from armillary.schedules.gpipe import gpipe
from armillary.schedules.lowering import Lowering
from armillary.stages.interpreter import Interpreter
from armillary.stages.reducer import Reducer
from armillary.stages.train_spec import StageReplicas, TrainSpec, side_by_side
from at_a_table import at_a_table
from staged_models import OPTIMIZERS, WIDTH, as_stages, data, drop, same, squared_error, stages_of, weights

STEPS, EACH = 4, 2  # micro-batches of a replica


def net(dropout=0.0):
    """Two stages, of three and five tensors."""
    return stages_of(2, dropout=dropout)


def grouped(stages, place, order=reversed):
    """Every stage's parameters in groups of two, in the order in which gradients come unless another is given."""
    found = {}
    for j, stage in enumerate(stages):
        named = list(order(list(stage.named_parameters())))
        pairs = [dict(named[first : first + 2]) for first in range(0, len(named), 2)]
        found[j] = [dense_unit(f"{j}.{n}", pair, build_dense("all_reduce"), place) for n, pair in enumerate(pairs)]
    return found


def replica(rank, seat, workers, micro_batches=EACH, clip=None, model=net, order=reversed, hear=None):
    """Weights at the end, losses."""
    stages = model()
    optimizer = OPTIMIZERS["momentum"](stages.parameters())
    scheduler, schedule, place = drop(optimizer, 2), accumulation(micro_batches, len(stages)), RankInfo(rank, workers)
    replicas = StageReplicas(place, seat, groups=grouped(stages, place, order))
    spec = TrainSpec(schedule, squared_error, 0, clip=clip)
    run = Interpreter(as_stages(stages), optimizer, spec, side_by_side(schedule, replicas))
    if hear is not None:
        hear(stages)
    losses = []
    for batches in data(STEPS, workers * micro_batches):
        losses += run.step(batches[rank * micro_batches :][:micro_batches])
        scheduler.step()
    return weights(stages), [one.losses for one in losses]


def truth(workers, micro_batches=EACH, clip=None, model=net):
    stages = model()
    optimizer = OPTIMIZERS["momentum"](stages.parameters())
    scheduler = drop(optimizer, 2)
    reference = WorkersReference(
        list(stages), optimizer, accumulation(micro_batches, len(stages)), squared_error, clip=clip
    )
    losses = []
    for batches in data(STEPS, workers * micro_batches):
        each = [batches[worker * micro_batches :][:micro_batches] for worker in range(workers)]
        losses.append(reference.step(each))
        scheduler.step()
    return weights(stages), losses


@pytest.mark.parametrize("wishes", [{}, {"micro_batches": 1}, {"clip": Clip(0.1)}], ids=["two", "one", "clipped"])
@pytest.mark.parametrize("workers", [2, 4])
def test_replicas_are_one_process_bit_for_bit_whoever_is_late(workers, wishes):
    wanted, losses = truth(workers, **wishes)
    for rank, (got, told) in enumerate(at_a_table(workers, lambda r, seat: replica(r, seat, workers, **wishes))):
        assert same(got, wanted)
        assert [list(step) for step in told] == [step[rank] for step in losses]


class Sometimes(nn.Module):
    """Uses one of its layers only for some inputs, another never, in groups with others."""

    def __init__(self):
        super().__init__()
        self.always, self.rarely, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                parameter.fill_(0.1 * (place + 1))

    def forward(self, value):
        value, positive = self.always(value), value.sum() > 0
        return self.rarely(value) if positive else value


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_parameters_that_some_use_count_as_zero_elsewhere_and_those_nobody_uses_stay(micro_batches):
    wishes = {"model": lambda: nn.ModuleList([Sometimes()]).double(), "micro_batches": micro_batches}
    used = {bool(batch[0].sum() > 0) for step in data(STEPS, 2 * micro_batches) for batch in step}
    assert used == {True, False}
    wanted, _ = truth(2, **wishes)
    for got, _ in at_a_table(2, lambda rank, seat: replica(rank, seat, 2, **wishes)):
        assert same(got, wanted)


def heard(order=reversed):
    """What rank 0 hears in its first step of one micro-batch: groups that leave, layers that backward reaches."""

    def act(rank, seat):
        def listen(stages):
            for j, stage in enumerate(stages):
                for name, one in stage.named_children():
                    reached = lambda _, told=f"layer {j}.{name}": seat.events.append(("reached", told))  # noqa: E731
                    one.register_forward_hook(lambda *given, reached=reached: given[2].register_hook(reached) and None)

        replica(rank, seat, 2, micro_batches=1, order=order, hear=listen)
        labels = [label for what, label in seat.events if what != "waited"]
        return labels[: len(labels) // STEPS]

    return at_a_table(2, act)[0]


def test_groups_leave_from_inside_the_backward_in_the_plans_order():
    """Stage 1 is two linear layers and a norm, stage 0 one of each; every group is a layer's, or the norm's."""
    said = [label for label in heard() if label.startswith(("1.", "0.", "layer"))]
    assert said.index("layer 1.2") < said.index("1.0") < said.index("layer 1.1") < said.index("1.1")
    assert said.index("layer 1.0") < said.index("1.2") < said.index("layer 0.1") < said.index("0.0")
    assert said.index("0.0") < said.index("layer 0.0") < said.index("0.1")
    said = heard(order=list)  # the first layer's is the first group: nothing leaves before it is there
    assert said.index("layer 1.0") < said.index("1.0") < said.index("1.1") < said.index("1.2")


def test_the_order_is_one_on_all_ranks_whatever_order_gradients_come_in():
    """Each rank goes through the two layers the other way round; the table refuses ranks out of order."""

    class Either(nn.Module):
        def __init__(self, is_turned):
            super().__init__()
            self.one, self.two, self.is_turned = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), is_turned

        def forward(self, value):
            first, last = (self.two, self.one) if self.is_turned else (self.one, self.two)
            return last(first(value))

    def act(rank, seat):
        replica(rank, seat, 2, micro_batches=1, model=lambda: nn.ModuleList([Either(rank == 1)]).double())
        return [label for what, label in seat.events if what == "sent"]

    assert at_a_table(2, act) == [["0.0", "0.1"] * STEPS] * 2


def test_a_backward_that_a_letter_follows_keeps_its_groups_until_that_is_gone():
    """Of a pipeline, every stage but the first; no group leaves before it is released, whatever is there."""

    def order_of(rank):
        made = Lowering(gpipe(2, 2), rank, range(2), reduces=True)
        return [one.op for one in made.next_step() if one.op in ("B", "REDUCE", "SEND")]

    assert order_of(0)[-2:] == ["REDUCE", "B"] and order_of(1)[-3:] == ["B", "SEND", "REDUCE"]


def test_two_steps_may_be_under_way_where_the_update_is_late():
    """A mean is taken after the next step's gradients are in, or without any (a drain)."""

    def act(rank, seat):
        parameter = nn.Parameter(torch.zeros(2))
        unit = dense_unit("all", {"p": parameter}, build_dense("all_reduce"), RankInfo(rank, 2))
        reducer = StageReplicas(RankInfo(rank, 2), seat, groups={0: [unit]}).reducer(0, is_late=True)
        assert isinstance(reducer, Reducer)
        means = []
        for step in range(3):
            reducer.put(step, parameter, torch.full((2,), 10.0 * step + rank))
            reducer.close(step)
            reducer.release(step)
            if step:
                means.append(reducer.mean(step - 1)[parameter].tolist())
        return [*means, reducer.mean(2)[parameter].tolist()]

    assert at_a_table(2, act) == [[[0.5, 0.5], [10.5, 10.5], [20.5, 20.5]]] * 2
