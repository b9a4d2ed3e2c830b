"""Faults planted into the library: the checks of the other files must see them."""

import copy
import dataclasses

import pytest
import test_cut
import torch
from nets import WORKERS, convolutions, cut, data, perceptron
from test_serving import served

from armillary.repurpose import cut_chain, layer_chain, restructuring, shards


def columns_are_not_moved(monkeypatch):
    """A rank's weights keep the old order of inputs, whatever order they arrive in."""
    moved = shards._columns
    monkeypatch.setattr(shards, "_columns", lambda part, number: moved(part, number).sort().values)


def biases_are_not_moved(monkeypatch):
    moved = shards._part

    def part(cut, rank):
        found = moved(cut, rank)
        for number, one in enumerate(cut.layers, 1):
            found[f"{number}.bias"] = one.layer.bias[: len(found[f"{number}.bias"])].clone()
        return found

    monkeypatch.setattr(shards, "_part", part)


def a_kept_input_is_not_sent(monkeypatch):
    sent = cut_chain.CutLayer.exchange

    def one_less(self, workers):
        found = sent(self, workers)
        arrives = found.arrives.clone()
        for rank, neuron in arrives.nonzero()[:1].tolist():
            arrives[rank, neuron] = False
        return dataclasses.replace(found, arrives=arrives)

    monkeypatch.setattr(cut_chain.CutLayer, "exchange", one_less)


def values_leave_in_the_old_order(monkeypatch):
    leaving = cut_chain.NeuronExchange.leaving
    monkeypatch.setattr(cut_chain.NeuronExchange, "leaving", lambda self, rank: leaving(self, rank).flip(0))


@pytest.mark.parametrize(
    "plant", [columns_are_not_moved, biases_are_not_moved, a_kept_input_is_not_sent, values_leave_in_the_old_order]
)
@pytest.mark.parametrize("model", [perceptron, convolutions])
def test_ranks_that_multiply_something_else_are_seen(crew, tmp_path, monkeypatch, plant, model):
    found = cut(model())
    plant(monkeypatch)
    found.save(tmp_path)
    x = data(model())[0][:4]
    (y,), _ = crew(WORKERS).run(served, str(tmp_path), [x])[0]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(y, found.model()(x), rtol=0, atol=1e-10)


def test_adjusting_on_the_original_activations_is_seen(monkeypatch):
    model, (batch, *_) = perceptron(), data(perceptron())
    inputs = {str(2 * number): x.detach() for number, (x, _) in enumerate(test_cut.layer_outputs(model, batch))}
    right = restructuring._moments
    monkeypatch.setattr(
        restructuring, "_moments", lambda layer, _, outputs: right(layer, [inputs[layer.name]], outputs)
    )
    with pytest.raises(AssertionError, match="Not equal"):
        test_cut.test_adjusting_solves_each_neurons_least_squares()


def test_a_capacity_that_is_broken_by_one_is_seen(monkeypatch):
    slots = cut_chain.NeuronPlacement.slots
    monkeypatch.setattr(
        cut_chain.NeuronPlacement, "slots", lambda self, many: [slots(self, many)[0] + 1, slots(self, many)[1] - 1]
    )
    with pytest.raises(AssertionError):
        test_cut.test_assignment_costs_what_the_best_of_all_does(0)


def test_a_second_best_assignment_is_seen(monkeypatch):
    monkeypatch.setattr(
        restructuring, "_assigned", lambda energy, owners, placement, price: placement.in_order(len(energy))
    )
    with pytest.raises(AssertionError):
        test_cut.test_assignment_costs_what_the_best_of_all_does(0)


def test_pruning_by_the_whole_energy_is_seen(monkeypatch):
    """A sent input is worth what its weights save beyond being kept, not all of their energy."""
    right = restructuring._pruned

    def pruned(energy, mine, owners, price):
        free = restructuring.Penalties(0.0, price.value)
        return right(energy, mine, owners, free) & (energy >= price.weight)

    monkeypatch.setattr(restructuring, "_pruned", pruned)
    with pytest.raises(AssertionError):
        [test_cut.test_pruning_costs_what_the_best_of_all_does(seed) for seed in range(5)]


def test_batch_norm_in_another_order_is_seen(monkeypatch):
    folded = layer_chain._folded

    def flipped(layer, name, norm):
        norm = copy.deepcopy(norm)  # the model's own is the truth
        for one in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            one.data = one.data.flip(0)
        return folded(layer, name, norm)

    monkeypatch.setattr(layer_chain, "_folded", flipped)
    with pytest.raises(ValueError, match="give another output than its forward"):
        cut(convolutions())
