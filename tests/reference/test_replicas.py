"""N replicas in one process: against arithmetic by hand and, where nothing departs, against the exact reference."""

import copy

import torch
from torch import nn

from armillary.exchanges import DenseExchange, build_dense
from armillary.reference.replicas import Replicas, SharedGroup
from armillary.reference.serial import train_step


class Line(nn.Module):
    """loss = weight * x"""

    def __init__(self):
        super().__init__()
        self.weight, self.never = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(3.0))

    def forward(self, batch):
        return self.weight * batch


def call(model, batch):
    return model(batch)


def half(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def meeting(steps):
    """Weights are averaged every so many steps."""

    def oracle(parcels, states):
        mean = sum(parcel.values for parcel in parcels) / len(parcels)
        return [parcel.answered(mean, parcel.tail) for parcel in parcels], list(states)

    return DenseExchange(None, 1, None, None, oracle, carries="weights", due=lambda taken: taken % steps == 0)


def test_what_departs_from_nothing_trains_as_the_exact_reference_does():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    truth, groups = copy.deepcopy(model), [SharedGroup(("0.weight", "2.bias"), build_dense("all_reduce"))]
    replicas = Replicas(model, half, 3, groups)  # what no group holds is averaged, too
    optimizer = half(truth)
    for step in range(3):
        batches = [torch.randn(5, 3, dtype=torch.float64) + step for _ in range(3)]
        losses = [replicas.step(batches, lambda net, x: net(x).square().mean(), weights=[1.0, 2.0, 3.0])]
        losses += [train_step(truth, optimizer, batches, lambda net, x: net(x).square().mean(), [1.0, 2.0, 3.0])]
        assert losses[0] == losses[1] or torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]))
    for one in replicas.models:
        for mine, want in zip(one.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)


def test_replicas_that_meet_every_second_step():
    replicas = Replicas(Line(), half, 2, [SharedGroup(("weight", "never"), meeting(2))])
    replicas.step([2.0, 4.0], call)
    assert [float(model.weight.detach()) for model in replicas.models] == [0.0, -1.0]
    assert float(replicas.consensus()["weight"]) == -0.5
    replicas.step([2.0, 4.0], call)  # to -1 and -3, which meet in the middle
    assert [float(model.weight.detach()) for model in replicas.models] == [-2.0, -2.0]
    assert [float(model.never.detach()) for model in replicas.models] == [3.0, 3.0]


def test_weights_that_meet_before_the_step_move_by_the_gradient_of_the_unmixed_ones():
    class Square(Line):
        def forward(self, batch):
            return (self.weight - batch) ** 2 / 2

    before = meeting(1)._replace(meeting="before")
    replicas = Replicas(Square(), half, 2, [SharedGroup(("weight", "never"), before)])
    replicas.step([2.0, 4.0], call)  # both begin at 1: to 1.5 and 2.5
    assert [float(model.weight.detach()) for model in replicas.models] == [1.5, 2.5]
    replicas.step([2.0, 4.0], call)  # they meet at 2, with gradients -0.5 and -1.5
    assert [float(model.weight.detach()) for model in replicas.models] == [2.25, 2.75]


def test_a_parameter_that_nobody_used_has_no_gradient():
    replicas = Replicas(Line(), half, 2, [SharedGroup(("weight", "never"), build_dense("all_reduce"))])
    replicas.step([2.0, 4.0], call)
    assert [float(model.weight.grad) for model in replicas.models] == [3.0, 3.0]
    assert replicas.models[0].never.grad is None


def test_one_model_stands_for_all_workers_that_are_kept_alike_and_only_for_those():
    alike = Replicas(Line(), half, 3, [SharedGroup(("weight", "never"), build_dense("all_reduce"))])
    apart = Replicas(Line(), half, 3, [SharedGroup(("weight", "never"), meeting(2))])
    assert len(set(map(id, alike.models))) == len(alike.optimizers) == 1 and len(alike.models) == 3
    assert len(set(map(id, apart.models))) == len(apart.optimizers) == 3


def test_another_may_answer_than_the_oracle():
    def doubled(exchange, parcels, states):
        total = sum(parcel.values for parcel in parcels) * 2
        return [parcel.answered(total, parcel.tail) for parcel in parcels], list(states)

    replicas = Replicas(Line(), half, 2, [SharedGroup(("weight", "never"), build_dense("all_reduce"))], doubled)
    replicas.step([2.0, 4.0], call)
    assert float(replicas.models[1].weight.grad) == 6.0
