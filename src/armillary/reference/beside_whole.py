"""Stages beside the model that they were cut from: what both return, their loss, every gradient and every buffer.

Where a meaning exists only at a cut (coded edges, weights of several ages, losses of a stage's own), the truth is a
loop over stages. It counts only where those stages, one after the other in one process, without codes and staleness,
do what `loss(model, batch)` does. Both draw the same random numbers, in the order of their operations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from armillary.facts.structure import TakenApart, take_apart

__all__ = ["Beside", "CutModel", "beside_whole"]

Loss = Callable[[nn.Module, Any], Tensor]
NOTHING = float("inf")
ROUNDING = 1e-12  # a gradient this small beside the largest one is zero but for rounding


class CutModel(NamedTuple):
    """A model and its loss in parts.

    Args:
        stages: each takes what the one before returns.
        loss: loss(output of the last, batch). input_of: what the first one reads of a batch.
    """

    stages: Sequence[nn.Module]
    loss: Callable[[Any, Any], Tensor]
    input_of: Callable[[Any], Any]


class Beside(NamedTuple):
    """Stages beside the whole.

    Args:
        differences: |stages - whole| / |whole| in norm, the largest of all batches, by "output", "loss", "gradient
            NAME" and "buffer NAME"; infinite where one has what the other has not.
        quiet: of those, gradients that are zero but for rounding.
        said: what is otherwise than a number can say; empty if nothing is.
        draws: whether a forward draws random numbers.
    """

    differences: Mapping[str, float]
    quiet: frozenset[str]
    said: str
    draws: bool


class _Seen(NamedTuple):
    """Of one batch."""

    output: TakenApart
    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def beside_whole(model: nn.Module, loss: Loss, cut: CutModel, batches: Sequence[Any], seed: int = 0) -> Beside:
    """Nothing is trained; buffers and random numbers are as before.

    Args:
        cut: of this model, whose parameters its stages hold.
    """
    differences, largest, most, said, draws = dict[str, float](), dict[str, float](), 0.0, "", False
    for number, batch in enumerate(batches):
        with torch.random.fork_rng():
            torch.manual_seed(seed + number)
            before = torch.get_rng_state()
            whole = _whole(model, loss, batch)
            draws = draws or not torch.equal(before, torch.get_rng_state())
            try:
                found = _in_stages(model, cut, batch, seed + number)
            except Exception as error:  # whatever the stages lack, the whole model has it
                differences["output"], said = NOTHING, said or f"the stages end in {type(error).__name__}: {error}"
                continue
        if whole.output.structure != found.output.structure:
            said = said or f"the stages return {found.output.structure}, the model {whole.output.structure}"
        for name, difference in _apart(whole, found):
            differences[name] = max(difference, differences.get(name, 0.0))
        for name, gradient in whole.gradients.items():
            true = _norm(gradient)
            most = max(true, most)
            largest[name] = max(true, _norm(found.gradients[name]), largest.get(name, 0.0))
    quiet = frozenset(f"gradient {name}" for name, norm in largest.items() if norm <= ROUNDING * most)
    return Beside(differences, quiet, said, draws)


def _whole(model: nn.Module, loss: Loss, batch: Any) -> _Seen:
    returned = list[Any]()
    hook = model.register_forward_hook(lambda module, given, output: returned.append(output))
    try:
        return _seen(model, lambda: loss(model, batch), returned)
    finally:
        hook.remove()


def _in_stages(model: nn.Module, cut: CutModel, batch: Any, seed: int) -> _Seen:
    value, returned = cut.input_of(batch), list[Any]()
    torch.manual_seed(seed)

    def of_batch() -> Tensor:
        passed = value
        for stage in cut.stages:
            passed = stage(passed)
        returned.append(passed)
        return cut.loss(passed, batch)

    return _seen(model, of_batch, returned)


def _seen(model: nn.Module, of_batch: Callable[[], Tensor], returned: Sequence[Any]) -> _Seen:
    """returned: is filled by `of_batch` with what the model returned."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    value = of_batch()
    found: Sequence[Tensor | None] = [None] * len(trained)
    if value.requires_grad and trained:
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    dense = {name: None if one is None else one.to_dense() for name, one in zip(trained, found, strict=True)}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    return _Seen(take_apart(returned[-1]), value.detach(), dense, buffers)


def _apart(whole: _Seen, found: _Seen) -> Iterator[tuple[str, float]]:
    is_alike = whole.output.structure == found.output.structure
    pairs = zip(whole.output.leaves, found.output.leaves, strict=True) if is_alike else [(None, 0)]
    yield "output", max((_difference(*pair) for pair in pairs), default=0.0)
    yield "loss", _difference(whole.loss, found.loss)
    for name, gradient in whole.gradients.items():
        yield f"gradient {name}", _difference(gradient, found.gradients[name])
    for name, buffer in whole.buffers.items():
        yield f"buffer {name}", _difference(buffer, found.buffers[name])


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.norm())


def _difference(true: Any, found: Any) -> float:
    if not (isinstance(true, Tensor) and isinstance(found, Tensor)):
        return 0.0 if true is found or (type(true) is type(found) and true == found) else NOTHING
    if true.shape != found.shape or true.dtype != found.dtype:
        return NOTHING
    if torch.equal(true, found):
        return 0.0
    wide = torch.complex128 if true.is_complex() else torch.float64
    difference = float((found.to(wide) - true.to(wide)).norm()) / (float(true.to(wide).norm()) or 1.0)
    return difference if difference > 0.0 else NOTHING
