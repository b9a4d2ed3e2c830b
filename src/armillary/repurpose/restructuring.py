"""One cut of a chain at given penalties: layer by layer neurons are assigned, weights pruned, what is left adjusted.

Abdi et al., *Restructuring, Pruning, and Adjustment of Deep Models for Parallel Distributed Inference*, 2020, minimise
what crosses workers and what the layers' outputs change by. What the paper leaves open is stated here: weight (i, j) of
a layer costs its energy e_ij = sum of W_ij^2 E[x_j^2] if it is cut, `weight` if it is kept; a value that crosses to a
worker costs `value`. x are activations of the layers before as already cut, over the calibration batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from armillary.repurpose.cut_chain import CutChain, CutLayer, NeuronPlacement
from armillary.repurpose.layer_chain import Layer, LayerChain

__all__ = ["Penalties", "Steps", "energies", "restructured", "sensitivities"]

RIDGE = 1e-4  # of the mean diagonal of the inputs' second moments


@dataclass(frozen=True)
class Penalties:
    """Of one layer. weight: of a weight that is kept. value: of one that is sent. In squares of the layer's outputs."""

    weight: float
    value: float


@dataclass(frozen=True)
class Steps:
    """Which of the three steps are done. Neurons that are not assigned lie in order, as in a plain cut."""

    assign: bool = True
    prune: bool = True
    adjust: bool = True


@torch.no_grad()
def restructured(
    chain: LayerChain,
    batches: Sequence[Tensor],
    placement: NeuronPlacement,
    penalties: Sequence[Penalties],
    steps: Steps,
) -> CutChain:
    """
    Args:
        batches: calibration inputs of the model.
        penalties: one a layer.
    """
    whole = [_through(chain.head, x) for x in batches]
    cut = list(whole)
    owners, is_changed = placement.inputs(whole[0].shape[1]), False
    layers: list[CutLayer] = []
    notes: list[str] = []
    for layer, penalty in zip(chain.layers, penalties, strict=True):
        module = layer.module(layer.weight, layer.bias)
        outputs = [module(x) for x in whole]
        shape = tuple(cut[0].shape[2:])
        energy = energies(layer, cut)
        price = Penalties(penalty.weight, penalty.value * torch.Size(shape).numel())
        in_order = placement.in_order(len(layer.weight))
        mine = _assigned(energy, owners, placement, price) if steps.assign else in_order
        kept = _pruned(energy, mine, owners, price) if steps.prune else torch.ones_like(energy, dtype=torch.bool)
        old = torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1).double()
        stays = torch.ones_like(old, dtype=torch.bool)
        stays[:, :-1] = kept.repeat_interleave(layer.weight[0, 0].numel(), 1)
        touched = (old.where(stays, 0) != old).any(1) | is_changed
        fitted = old.where(stays, 0)
        if steps.adjust and bool(touched.any()):
            fitted[touched] = _adjusted(fitted, stays, mine, *_moments(layer, cut, outputs))[touched]
        new = replace(
            layer,
            weight=fitted[:, :-1].view_as(layer.weight).to(layer.weight.dtype),
            bias=fitted[:, -1].to(layer.bias.dtype),
        )
        is_changed = is_changed or bool(touched.any())
        if len(layer.weight) < len(placement.shares):
            notes.append(f"{layer.name}: {len(layer.weight)} neurons, fewer than workers: whole on rank 0")
        most, rows = int(stays.sum(1).max()) - 1, sum(y[:, 0].numel() for y in outputs)
        if is_changed and rows < most:
            notes.append(f"{layer.name}: {rows} calibration samples for {most} kept inputs: the ridge decides")
        one = CutLayer(new, mine, owners, shape)
        if not layers:  # an input of the model that no weight multiplies stays on rank 0
            one = CutLayer(new, mine, torch.where(one.kept.any(0), owners, 0), shape)
        layers.append(one)
        whole = [_through(layer.after, y) for y in outputs]
        module = new.module(new.weight, new.bias)
        cut = [_through(new.after, module(x)) for x in cut] if is_changed else whole
        owners = mine.repeat_interleave(whole[0].shape[1] // len(mine))  # a channel that is flattened is many inputs
    return CutChain(chain, placement, tuple(layers), owners, tuple(whole[0].shape[2:]), tuple(notes))


def energies(layer: Layer, inputs: Sequence[Tensor]) -> Tensor:
    """(neurons, inputs): E[(W_ij x_j)^2], of a Conv2d summed over its kernel and output positions."""
    squares = sum((layer.columns(x).double().square().sum(0) for x in inputs), torch.zeros(())) / sum(map(len, inputs))
    by_element = layer.weight.double().flatten(1).square() * squares
    return by_element.view(len(layer.weight), layer.weight.shape[1], -1).sum(-1)


def _assigned(energy: Tensor, owners: Tensor, placement: NeuronPlacement, price: Penalties) -> Tensor:
    """(neurons,): the worker of each, by the Hungarian algorithm over the workers' slots.

    A neuron's cost on a worker is the least over each input of cutting it and keeping it, as if it were the only neuron
    there that wants the input: an upper bound, since neurons share what arrives.

    Args:
        energy: (neurons, inputs).
        owners: (inputs,).
    """
    slots = placement.slots(len(energy))
    costs = [
        torch.minimum(energy, price.weight + price.value * (owners != worker)).sum(1) for worker in range(len(slots))
    ]
    slot_owner = torch.repeat_interleave(torch.arange(len(slots)), torch.tensor(slots))
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(torch.stack(costs, 1)[:, slot_owner].numpy())
    found = torch.empty(len(energy), dtype=torch.long)
    found[torch.from_numpy(rows)] = slot_owner[torch.from_numpy(columns)]
    return found


def _pruned(energy: Tensor, mine: Tensor, owners: Tensor, price: Penalties) -> Tensor:
    """(neurons, inputs): which weights stay. An input is sent where what its weights gain together is worth it."""
    kept = energy >= price.weight
    for worker in mine.unique():
        here = mine == worker
        gain = (energy[here] - price.weight).clamp(min=0).sum(0)
        kept[here] &= (owners == worker) | (gain >= price.value)
    return kept


def _adjusted(weights: Tensor, stays: Tensor, mine: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """Weights and biases, (neurons, columns), for the whole model's output of the layer by least squares.

    Per neuron, on the columns S that stay: (G_SS + ridge) d = r_S - G_SS w_S, and w_S + d is new. The ridge pulls to
    the old weights. The neurons of a worker share one inverse H, of all columns that one of them keeps. Columns C that
    a neuron has not are then held at zero: d = u - H_C (H_CC)^-1 u_C, with u = H (r - G w).

    Args:
        stays: (neurons, columns), what is kept; `weights` are zero elsewhere.
        mine: (neurons,), the worker of each.
        gram, cross: E[x x^T], (columns, columns), and E[x y], (columns, neurons).
    """
    rest, new = cross.T - weights @ gram, weights.clone()
    ridge = RIDGE * gram.diagonal().mean()
    for worker in mine.unique():
        neurons = (mine == worker).nonzero()[:, 0]
        columns = stays[neurons].any(0).nonzero()[:, 0]
        inner = gram[columns[:, None], columns]
        inner.diagonal().add_(ridge)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(inner))
        for neuron, moved in zip(neurons.tolist(), rest[neurons][:, columns] @ inverse, strict=True):
            left, gone = stays[neuron, columns].nonzero()[:, 0], (~stays[neuron, columns]).nonzero()[:, 0]
            if len(left) < len(gone):  # their own equations are fewer
                factor = torch.linalg.cholesky(inner[left[:, None], left])
                moved = torch.zeros_like(moved)
                moved[left] = torch.cholesky_solve(rest[neuron, columns[left], None], factor)[:, 0]
            elif len(gone):
                factor = torch.linalg.cholesky(inverse[gone[:, None], gone])
                moved = moved - inverse[:, gone] @ torch.cholesky_solve(moved[gone, None], factor)[:, 0]
                moved[gone] = 0
            new[neuron, columns] += moved
    return new


def _moments(layer: Layer, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """E[x x^T] and E[x y], in float64, summed over output positions. The last column of x is 1, for the bias.

    Args:
        inputs: of the layers before as already cut.
        outputs: of this layer in the whole model.
    """
    gram, cross = torch.zeros(()), torch.zeros(())
    for x, y in zip(inputs, outputs, strict=True):
        columns = layer.columns(x).double()
        columns = torch.cat([columns, columns.new_ones(len(columns), 1)], 1)
        gram = gram + columns.T @ columns
        cross = cross + columns.T @ y.view(*y.shape[:2], -1).transpose(1, 2).flatten(0, 1).double()
    samples = sum(map(len, inputs))
    return gram / samples, cross / samples


def _through(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


@torch.no_grad()
def sensitivities(chain: LayerChain, x: Tensor) -> list[float]:
    """How much of the energy of an error in a layer's outputs arrives in the model's, one number a layer.

    Seen by noise of a tenth of the outputs' deviation, on one batch `x` of the model's inputs. The paper weighs all
    layers alike; then the layers whose errors die out are cut too little.
    """
    found, x = [], _through(chain.head, x)
    draw = torch.Generator().manual_seed(0)
    for at, layer in enumerate(chain.layers):
        y = layer.module(layer.weight, layer.bias)(x)
        noise = 0.1 * y.std() * torch.randn(y.shape, generator=draw, dtype=y.dtype)
        rest = [*layer.after]
        for later in chain.layers[at + 1 :]:
            rest += [later.module(later.weight, later.bias), *later.after]
        moved = _through(rest, y + noise) - _through(rest, y)
        found.append(float(moved.square().sum() / noise.square().sum()))
        x = _through(layer.after, y)
    return found
