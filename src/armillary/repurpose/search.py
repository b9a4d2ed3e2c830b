"""How hard to cut: ten penalties are tried; the fewest values sent, within what the user may lose, is taken."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from armillary.repurpose.cut_chain import CutChain, NeuronPlacement
from armillary.repurpose.layer_chain import LayerChain, read
from armillary.repurpose.restructuring import Penalties, Steps, energies, restructured, sensitivities
from armillary.repurpose.shards import CurvePoint, Shards

__all__ = ["cut", "searched"]

EVENLY, BETWEEN = 10, 3  # penalties tried
LEAST, MOST = 1e-4, 1.0  # of the largest energy that one value of a layer's inputs carries into the model's outputs
OF_A_VALUE = 1e-3  # what a kept weight costs, beside a value that is sent

Measure = Callable[[nn.Module, Sequence[Any]], float]


def cut(
    model: nn.Module,
    workers: int,
    batches: Iterable[Any],
    measure: Measure,
    drop: float = 0.01,
    inputs: str = "spread",
    capacities: Sequence[float] | None = None,
) -> Shards:
    """Cuts a trained model by neurons over workers, so that few values cross between them at inference.

    The model is left as it is. It is looked at on the CPU, in evaluation mode.

    Args:
        model: a chain of Linear, Conv2d, elementwise activations, BatchNorm, pooling, Flatten; float32 or float64.
        batches: a tensor each, or a tuple that begins with one: what the model is given. The first, third and so on
            calibrate; the rest judges.
        measure: called as measure(model, batches) with a cut model and the batches that judge; higher is better.
        drop: by how much `measure` may fall.
        inputs: "spread": the model's inputs are spread evenly over the workers; "rank 0": they stay there.
        capacities: the share of every layer's neurons, by worker; None: equal. They add up to 1.

    Raises:
        ValueError: the model is no chain of layers, or an argument is not as above.
    """
    placement = _placement(workers, inputs, capacities)
    if not (math.isfinite(drop) and drop >= 0):
        raise ValueError(f"repurpose.cut: drop: want 0 or more, got {drop}")
    if isinstance(batches, Tensor):
        raise ValueError("repurpose.cut: batches: want a list of batches, got one tensor")
    given = list(batches)
    if len(given) < 2:
        raise ValueError(
            f"repurpose.cut: batches: want 2 or more, half to calibrate and half to judge; got {len(given)}"
        )
    calibration, judging = [_input_of(batch) for batch in given[::2]], given[1::2]
    chain = read(model, calibration[0])
    return searched(chain, calibration, lambda one: measure(one, judging), placement, drop, Steps())


def searched(
    chain: LayerChain,
    calibration: Sequence[Tensor],
    measure: Callable[[nn.Module], float],
    placement: NeuronPlacement,
    drop: float,
    steps: Steps,
) -> Shards:
    """One penalty of values for all layers, in squares of the model's outputs: 0, which cuts nothing, then evenly by
    powers, then between the largest that loses no more than `drop` and the next."""
    arrives = [max(share, 1e-12) for share in sensitivities(chain, calibration[0])]
    largest = _largest_energy(chain, calibration, arrives)
    penalties = [0.0] + [largest * LEAST * (MOST / LEAST) ** (step / (EVENLY - 1)) for step in range(EVENLY)]
    best: CutChain | None = None
    curve: list[CurvePoint] = []
    chosen = 0
    while penalties:
        value = penalties.pop(0)
        by_layer = [Penalties(OF_A_VALUE * value / share, value / share) for share in arrives]
        found = restructured(chain, calibration, placement, by_layer, steps)
        rows = list(found.traffic())
        with torch.no_grad():
            measured = float(measure(found.model()))
        if not math.isfinite(measured):
            raise ValueError(f"repurpose.cut: measure: want a finite number, got {measured}")
        curve.append(CurvePoint(value, sum(row.sent for row in rows), sum(row.plain for row in rows), measured))
        if best is None or (curve[0].measured - measured <= drop and curve[-1].sent < curve[chosen].sent):
            best, chosen = found, len(curve) - 1
        within = max(point.penalty for point in curve if curve[0].measured - point.measured <= drop)
        beyond = min((point.penalty for point in curve if point.penalty > within), default=0.0)
        if not penalties and len(curve) <= EVENLY + BETWEEN and within and beyond:
            penalties = [math.sqrt(within * beyond)]
    assert best is not None
    return Shards(best, tuple(curve), chosen)


def _placement(workers: int, inputs: str, capacities: Sequence[float] | None) -> NeuronPlacement:
    if workers < 1:
        raise ValueError(f"repurpose.cut: workers: want 1 or more, got {workers}")
    if inputs not in ("spread", "rank 0"):
        raise ValueError(f"repurpose.cut: inputs: want 'spread' or 'rank 0', got {inputs!r}")
    shares = tuple(capacities) if capacities is not None else (1 / workers,) * workers
    if len(shares) != workers or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(
            f"repurpose.cut: capacities: want {workers} shares that add up to 1, got {list(shares)}, together "
            f"{sum(shares):g}"
        )
    return NeuronPlacement(shares, inputs == "spread")


def _input_of(batch: Any) -> Tensor:
    x = batch[0] if isinstance(batch, tuple | list) else batch
    if not isinstance(x, Tensor):
        raise ValueError(
            f"repurpose.cut: batches: want a tensor, or a tuple that begins with one; got {type(x).__name__}"
        )
    return x.detach().cpu()


@torch.no_grad()
def _largest_energy(chain: LayerChain, calibration: Sequence[Tensor], arrives: Sequence[float]) -> float:
    """That one value of an input carries through a layer into the outputs of the whole model.

    Args:
        arrives: what arrives there of an error in each layer's outputs.
    """
    largest = 0.0
    xs = [nn.Sequential(*chain.head)(x) for x in calibration]
    for layer, share in zip(chain.layers, arrives, strict=True):
        largest = max(largest, share * float(energies(layer, xs).sum(0).max()) / xs[0][0, 0].numel())
        whole = nn.Sequential(layer.module(layer.weight, layer.bias), *layer.after)
        xs = [whole(x) for x in xs]
    return largest
