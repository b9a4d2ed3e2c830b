"""Truths that start from the user's whole model, and stages held beside it.

`WholeModel` is `loss(model, batch)` of the user's own model, one micro-batch after the other. It knows no stage, so it
shares no fault with what cuts a model. Running statistics are kept by replica, since replicas with data of their own do
not tell each other theirs.

Where a meaning exists only at a cut (coded edges, old weights, losses of a stage's own), the truth is a loop over
stages. It counts only where those stages, without codes and staleness, do what `loss(model, batch)` does:
`beside_whole` compares output, loss, every gradient and every buffer. Both draw the same random numbers, in the order
of their operations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from armillary.models.structure import TakenApart, take_apart
from armillary.reference.serial import clip_gradients
from armillary.schedules.clipping import Clip

__all__ = ["Beside", "CutModel", "WholeModel", "beside_whole", "with_own_loss"]

Learns = Callable[[nn.Module, Any], Tensor]


def with_own_loss(stage: nn.Module, tensors: Mapping[str, Tensor], value: Any, learns: Learns) -> tuple[Any, Tensor]:
    """
    Args:
        tensors: parameters and buffers, by the stage's own names.
        learns: (stage, output) -> scalar.
    """
    named = {f"stage.{name}": tensor for name, tensor in tensors.items()}
    found: tuple[Any, Tensor] = functional_call(_Learning(stage, learns), named, (value,))
    return found


class _Learning(nn.Module):
    def __init__(self, stage: nn.Module, learns: Learns) -> None:
        super().__init__()
        self.stage, self.learns = stage, learns

    def forward(self, value: Any) -> tuple[Any, Tensor]:
        output = self.stage(value)
        return output, self.learns(self.stage, output)


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


Sums = dict[nn.Parameter, Tensor]


class WholeModel:
    """
    Args:
        model: it is trained in place. stages: its parameters by stage, by whose norms a schedule may clip.
        clip: of the mean gradient of every step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        replicas: int = 1,
        stages: Sequence[Sequence[nn.Parameter]] = (),
        clip: Clip | None = None,
    ) -> None:
        self._model, self._optimizer, self._loss, self._clip = model, optimizer, loss, clip
        self._stages = [nn.ParameterList(one) for one in stages]
        self._step, self._squares, self._drains = 0, dict[int, Tensor](), list[int]()
        start = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.buffers = [start | {} for _ in range(replicas)]

    def drain(self) -> None:
        """Everything before the next step has finished; it always has."""
        self._drains.append(self._step)

    def step(self, batches: Sequence[Sequence[Any]]) -> list[Tensor]:
        """One training step; returns the losses. batches: [replica][micro-batch].

        A replica's gradients are added up in the order of its micro-batches and divided by their number, then the mean
        over replicas is taken, in their order.
        """
        losses, means = list[Tensor](), Sums()
        for replica, mine in enumerate(batches):
            own = Sums()
            for batch in mine:
                losses.append(self._add_gradients(own, replica, batch))
            for parameter, total in own.items():
                _add(means, parameter, total / len(mine))
        for parameter, total in means.items():
            parameter.grad = total / len(batches)
        if self._clip is not None:
            clip_gradients(self._stages, self._clip, self._step, self._squares, self._drains)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._put(self.buffers[0])
        self._step += 1
        return losses

    def _add_gradients(self, sums: Sums, replica: int, batch: Any) -> Tensor:
        """Those of one micro-batch, with the replica's running statistics; returns its loss."""
        self._put(self.buffers[replica])
        value = self._loss(self._model, batch)
        value.backward()
        self.buffers[replica] = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                _add(sums, parameter, parameter.grad.to_dense())
        self._model.zero_grad(set_to_none=True)
        return value.detach()

    def _put(self, buffers: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(buffers[name])


def _add(sums: Sums, parameter: nn.Parameter, gradient: Tensor) -> None:
    sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
