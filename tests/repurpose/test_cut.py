"""A cut as its user sees it, and each of its steps against plain loops."""

import numpy as np
import pytest
import torch
from brute_force import adjusted, assignment_cost, energies, least_assignment, least_pruning, pruning_cost, values_sent
from nets import WORKERS, block_diagonal, closeness, convolutions, cut, data, perceptron
from torch import nn

from armillary import repurpose
from armillary.repurpose.cut_chain import NeuronPlacement
from armillary.repurpose.layer_chain import read
from armillary.repurpose.restructuring import Penalties, Steps, restructured, sensitivities

MODELS = {"Linear": perceptron, "Conv2d": convolutions}


def restructure(model, batches, weight=0.0, value=0.0, steps=Steps(), workers=WORKERS):  # noqa: B008
    placement = NeuronPlacement((1 / workers,) * workers, is_spread=True)
    chain = read(model, batches[0])
    return restructured(chain, batches, placement, [Penalties(weight, value)] * len(chain.layers), steps)


@torch.no_grad()
def largest(one, other, batches):
    return max(float((one(x) - other(x)).abs().max()) for x in batches)


# ---------------------------------------------------------------------------------------------- what the user types


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_sends_less_than_a_plain_one_and_loses_no_more_than_it_may(name):
    model = MODELS[name]()
    shards = cut(model, drop=0.3)
    whole, taken = shards.curve[0], shards.curve[shards.chosen]
    assert whole.measured == pytest.approx(0, abs=1e-20) and len(shards.curve) == 14
    assert 0 < taken.sent < whole.sent <= whole.plain
    within = [point for point in shards.curve if whole.measured - point.measured <= 0.3]
    assert taken.sent == min(point.sent for point in within)
    batches = data(model)
    assert taken.measured == closeness(model, batches)(shards.model(), batches[1::2])  # half of them judge


def test_it_prints_a_table_and_saves_what_it_loads(tmp_path):
    shards = cut(convolutions())
    shards.save(tmp_path / "shards")
    assert {path.suffix for path in (tmp_path / "shards").iterdir()} == {".json", ".safetensors"}
    again = repurpose.Shards.load(tmp_path / "shards")
    assert str(again) == str(shards) and again.curve == shards.curve
    assert largest(again.model(), shards.model(), data(convolutions())) == 0
    lines = str(shards).splitlines()
    assert lines[0].split("  ")[0] == "layer" and [line.split()[0] for line in lines[1:8]] == [
        "inputs", "first", "second", "third", "last", "outputs", "together",
    ]  # fmt: skip
    taken = shards.curve[shards.chosen]
    assert f"{taken.sent:,}" in lines[7] and f"{taken.measured:.4g} after" in lines[8]
    assert "fewer than workers: whole on rank 0" not in str(shards)


def test_it_draws_the_curve(tmp_path):
    cut(perceptron()).plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5_000


def test_the_model_is_left_as_it_is():
    model = convolutions().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    batches = data(model)
    repurpose.cut(model, 2, batches, lambda one, judging: -float(one(judging[0]).square().mean()))
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("adjust", [False, True])
def test_without_penalties_the_cut_model_is_the_original(name, adjust):
    model = MODELS[name]()
    found = restructure(model, data(model), steps=Steps(adjust=adjust))
    fresh = [10 * x for x in data(model)]  # other values than it was cut with
    assert largest(found.model(), model, fresh) <= 1e-12 * largest(model, lambda x: 0, fresh)


@pytest.mark.parametrize("adjust", [False, True])
def test_a_shuffled_block_diagonal_net_comes_back_with_nothing_sent_between_layers(adjust):
    model = block_diagonal()
    batches = [torch.randn(250, 32, dtype=torch.float64) for _ in range(2)]
    found = restructure(model, batches, 1e-18, 1e-3, Steps(adjust=adjust), workers=4)
    between = list(found.traffic())[1:-1]
    assert [row.sent for row in between] == [0, 0, 0] and [row.plain for row in between] == [96, 96, 96]
    assert largest(found.model(), model, batches) == 0


def test_inputs_on_rank_0_are_not_spread():
    spread, kept = cut(perceptron()), cut(perceptron(), inputs="rank 0")
    rows = [next(shards.cut.traffic()) for shards in (spread, kept)]
    assert rows[0].plain == 8 and rows[1].plain == rows[1].sent == 0 and rows[1].neurons == (12, 0, 0)


def test_capacities_deal_neurons_out():
    rows = list(cut(perceptron(), capacities=(0.5, 0.25, 0.25)).cut.traffic())
    assert [row.neurons for row in rows[1:3]] == [(9, 5, 4), (8, 3, 4)] and all(sum(row.neurons) for row in rows)


def test_a_layer_with_fewer_neurons_than_workers_lies_on_rank_0():
    shards = cut(perceptron(), workers=5)
    assert list(shards.cut.traffic())[3].neurons == (4, 0, 0, 0, 0)
    assert "4: 4 neurons, fewer than workers: whole on rank 0" in str(shards)


# ------------------------------------------------------------------------------------------------ against plain loops


def one_layer(neurons, inputs, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, neurons)).double()
    return model, [torch.randn(60, inputs, dtype=torch.float64) * torch.rand(inputs).double() * 2]


@pytest.mark.parametrize("seed", range(5))
def test_assignment_costs_what_the_best_of_all_does(seed):
    model, batches = one_layer(6, 5, seed)
    found = restructure(model, batches, 0.01, 0.1, workers=2).layers[0]
    energy, owners = energies(model[0].weight.detach().numpy(), batches[0].numpy()), [0, 0, 1, 1, 1]
    slots = [found.owners.tolist().count(worker) for worker in range(2)]
    assert slots == [3, 3]
    cost = assignment_cost(energy, owners, found.owners.tolist(), 0.01, 0.1)
    assert cost == pytest.approx(least_assignment(energy, owners, slots, 0.01, 0.1), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_pruning_costs_what_the_best_of_all_does(seed):
    model, batches = one_layer(3, 4, seed)
    found = restructure(model, batches, 0.1, 0.15, Steps(adjust=False), workers=2).layers[0]
    energy, owners = energies(model[0].weight.detach().numpy(), batches[0].numpy()), [0, 0, 1, 1]
    places, kept = found.owners.tolist(), found.kept.numpy()
    least, _ = least_pruning(energy, places, owners, 0.1, 0.15)
    assert pruning_cost(energy, kept, places, owners, 0.1, 0.15) == pytest.approx(least, rel=1e-12)
    assert found.exchange(2).values == len(values_sent(kept, places, owners))


def layer_outputs(model, x):
    """What every Linear or Conv2d of a plain model is given, and gives."""
    seen = []
    for module in model:
        y = module(x)
        if isinstance(module, nn.Linear | nn.Conv2d):
            seen.append((x, y))
        x = y
    return seen


def test_adjusting_solves_each_neurons_least_squares():
    model, (batch, *_) = perceptron(), data(perceptron())
    found = restructure(model, [batch], 1e-4, 0.1)
    for cut_layer, whole, (x, _), (_, target) in zip(
        found.layers, [one for one in model if isinstance(one, nn.Linear)],
        layer_outputs(found.model(), batch), layer_outputs(model, batch), strict=True,
    ):  # fmt: skip
        old = torch.cat([whole.weight, whole.bias[:, None]], 1).detach().numpy()
        new = torch.cat([cut_layer.layer.weight, cut_layer.layer.bias[:, None]], 1).numpy()
        for neuron, kept in enumerate(cut_layer.kept.numpy()):
            want = adjusted(old[neuron], kept, x.detach().numpy(), target[:, neuron].detach().numpy())
            np.testing.assert_allclose(new[neuron], want, atol=1e-9)
    assert 0.2 < float(found.layers[1].kept.double().mean()) < 0.9  # something was cut


def convolved_by_hand(weight, bias, x, stride, padding):
    """One output at a time."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    size = weight.shape[2]
    steps = (x.shape[2] - size) // stride + 1
    rows = [x[:, :, i * stride : i * stride + size, j * stride : j * stride + size] for i in range(steps) for j in range(steps)]  # fmt: skip  # noqa: E501
    return np.stack([np.einsum("bmhw,nmhw->bn", row, weight) + bias for row in rows], -1), rows


def test_a_convolution_is_cut_by_the_energy_of_its_kernels():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1)).double()
    batch = torch.randn(10, 4, 5, 5, dtype=torch.float64)
    outputs, rows = convolved_by_hand(*(one.detach().numpy() for one in model[0].parameters()), batch.numpy(), 2, 1)
    np.testing.assert_allclose(model(batch).detach().flatten(2).numpy(), outputs, atol=1e-12)
    weight = model[0].weight.detach().numpy()
    energy = sum(np.einsum("nmhw,bmhw->nm", weight**2, row**2) for row in rows) / len(batch)
    price = float(np.median(energy)) * 3 / 25
    found = restructure(model, [batch], 1e-3 * price, price, Steps(adjust=False), workers=2).layers[0]
    places, owners = found.owners.tolist(), [0, 0, 1, 1]
    cost = assignment_cost(energy, owners, places, 1e-3 * price, 25 * price)
    assert cost == pytest.approx(least_assignment(energy, owners, [3, 3], 1e-3 * price, 25 * price), rel=1e-12)
    for worker in range(2):
        for j, owner in enumerate(owners):
            gain = sum(max(energy[i][j] - 1e-3 * price, 0) for i in range(6) if places[i] == worker)
            kept = found.kept[[i for i in range(6) if places[i] == worker], j]
            assert owner == worker or bool(kept.any()) == (gain > 25 * price)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("value", [0.01, 0.1, 1.0])
def test_adjusting_never_raises_a_layers_calibration_error(name, value):
    """Layer by layer behind the same layers: this one's weights as they were kept, and adjusted."""
    model, batches = MODELS[name](), data(MODELS[name]())
    found = restructure(model, batches, 1e-3 * value, value)
    plain = read(model, batches[0])
    whole = plain.model([(one.weight, one.bias) for one in plain.layers])
    cut_model = found.model()
    errors = [[0.0, 0.0] for _ in found.layers]
    for batch in batches:
        pairs = zip(layer_outputs(cut_model, batch), layer_outputs(whole, batch), strict=True)
        for number, ((x, new), (_, target)) in enumerate(pairs):
            old, kept = plain.layers[number], found.layers[number].kept
            mask = kept.view(*kept.shape, *[1] * (old.weight.dim() - 2))
            unadjusted = old.module(old.weight * mask, old.bias)(x)
            errors[number][0] += float((unadjusted - target).square().sum())
            errors[number][1] += float((new - target).square().sum())
    assert all(after <= before for before, after in errors) and errors[-1][0] > 0


def test_fewer_samples_than_inputs_are_said():
    model = perceptron()
    found = restructure(model, [data(model)[0][:6]], 1e-6, 1e-3)
    assert any("6 calibration samples for" in note and "the ridge decides" in note for note in found.notes)


def test_an_error_arrives_in_the_outputs_as_the_later_layers_carry_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 200), nn.Linear(200, 30), nn.Linear(30, 10)).double()
    x = torch.randn(500, 40, dtype=torch.float64)
    middle, last = model[1].weight.detach(), model[2].weight.detach()
    want = [float((last @ middle).square().sum()) / 200, float(last.square().sum()) / 30, 1.0]  # E|W n|^2 = |W|^2 s^2
    torch.testing.assert_close(torch.tensor(sensitivities(read(model, x), x)), torch.tensor(want), rtol=0.05, atol=0)
