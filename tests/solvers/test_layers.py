"""`layers`: how many sweeps over all layers agree with the pass through them."""

import pytest
import torch
from torch import nn

from armillary import solvers


class Dense(nn.Module):
    """As a layer of DenseNet: it reads all outputs before it."""

    def __init__(self, inputs, strength):
        super().__init__()
        self.linear, self.strength = nn.Linear(4 * inputs, 4), strength

    def forward(self, before):
        return torch.relu(self.linear(torch.cat(before, -1))) * self.strength


def stack(layers, strength):
    torch.manual_seed(0)
    return [Dense(number, strength) for number in range(1, layers + 1)]


def test_a_chain_takes_as_many_sweeps_as_it_has_layers():
    torch.manual_seed(0)
    found = solvers.layers([nn.Linear(4, 4) for _ in range(6)], torch.ones(2, 4))
    assert found.sweeps == 6 and found.errors[-1] == 0 and len(found.layer_seconds) == 6
    assert found.estimated_seconds == pytest.approx(6 * max(found.layer_seconds))


def test_weak_connections_take_fewer_and_the_error_falls():
    found = solvers.layers(stack(12, 0.3), torch.ones(2, 4), tolerance=1e-3, dense=True)
    assert 1 < found.sweeps < 9 and found.errors[-1] <= 1e-3 < found.errors[0]
    looser = solvers.layers(stack(12, 0.3), torch.ones(2, 4), tolerance=0.1, dense=True)
    assert looser.sweeps < found.sweeps
    assert str(found).startswith(f"{found.sweeps} sweeps for 12 layers, ")


def test_the_errors_are_those_of_plain_sweeps():
    layers, x = stack(5, 1.0), torch.ones(2, 4)
    found = solvers.layers(layers, x, tolerance=0.0, dense=True)
    truth, states = [x], [x, *(torch.zeros(2, 4) for _ in layers)]
    with torch.no_grad():
        for layer in layers:
            truth.append(layer(truth))
        for error in found.errors:
            states = [x, *(layer(states[:t]) for t, layer in enumerate(layers, start=1))]
            assert error == pytest.approx(float((states[-1] - truth[-1]).norm() / truth[-1].norm()), abs=1e-7)
    assert found.sweeps == 5 and found.errors[-1] == 0


def test_no_layer_at_all():
    assert solvers.layers([], torch.ones(2)).sweeps == 0
