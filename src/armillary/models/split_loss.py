"""A loss(model, batch) taken apart: what the model is called with, and the loss of what it returns.

A schedule runs the model stage by stage, so nobody calls `loss(model, batch)` whole. It is called twice instead, with a
stand-in for the model: one that notes what it is given and stops there, and one that returns the last stage's output.
What cannot be taken apart like this (a loss that calls the model twice, or reads its weights) is refused beforehand.

Forward and loss run under the autocast that was on when the step was handed in, whoever calls the runtime when they are
due. Backward and the optimizer run without, as torch recommends. Casts of weights are kept within one stage's forward
only: torch keeps them until the outermost region ends, which here might be the whole training.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from armillary.models.preserved_state import untouched
from armillary.models.structure import mapped, unopened

__all__ = ["Autocast", "SplitLoss", "device_type_of", "scaler_refused", "without_autocast"]


@dataclass(frozen=True)
class Autocast:
    """What is on for the tensors of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"autocast to {str(self.dtype).removeprefix('torch.')}" if self.enabled else "no autocast"

    @classmethod
    def now(cls, device_type: str) -> "Autocast":
        return cls(device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    @contextmanager
    def again(self) -> Iterator[None]:
        torch.clear_autocast_cache()
        try:
            with torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled):
                yield
        finally:
            torch.clear_autocast_cache()


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    with torch.autocast(device_type, enabled=False):
        yield


def device_type_of(tensors: Iterable[Tensor]) -> str:
    """Of the first of them; the host's if there is none."""
    return next((tensor.device.type for tensor in tensors), "cpu")


Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]


class SplitLoss:
    """
    Args:
        example: a batch to try it on; the model is left as it was.

    Raises:
        ValueError: the loss does not call the model exactly once with positional arguments, depends on its weights
            besides, or is scaled by a GradScaler.
    """

    def __init__(self, loss: Loss, model: nn.Module, example: Batch) -> None:
        self._loss, self._model = loss, model
        try:
            with untouched(model), scaler_refused():
                self._refuse_what_cannot_be_split(example)
        except AttributeError as error:
            raise ValueError(str(error)) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitLoss":
        """With the copied model; the loss may be a method of all the data there is, and stays."""
        memo[id(self)] = made = copy.copy(self)
        made._model = copy.deepcopy(self._model, memo)
        return made

    def input_of(self, batch: Batch) -> tuple[Any, ...]:
        """What the first stage reads: the model's positional arguments."""
        return self._call(batch).given

    def _call(self, batch: Batch) -> "_Call":
        calls: list[_Call] = []

        def note(*given: Any) -> Any:
            calls.append(_Call(given, self._autocast()))
            raise _Noted

        try:
            self._loss(_StandIn(self._model, note), batch)
        except _Noted:
            return calls[0]
        raise ValueError("schedule: the loss never calls the model, so there is nothing to cut into stages")

    def _autocast(self) -> Autocast:
        return Autocast.now(device_type_of(self._model.parameters()))

    def of_output(self, output: Any, batch: Batch) -> Tensor:
        """The loss, from what the last stage returns."""
        return self._loss(_StandIn(self._model, lambda *_: output), batch)

    def _refuse_what_cannot_be_split(self, batch: Batch) -> None:
        before = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        torch.manual_seed(0)
        whole = self._loss(self._model, batch).detach()
        given = self.input_of(batch)
        with torch.no_grad():
            for buffer, value in before:  # which a forward may change, and the next one read (spectral norm)
                buffer.copy_(value)
        torch.manual_seed(0)
        output = self._model(*given)
        if kind := unopened(output):
            raise ValueError(
                f"schedule: the model returns a {kind}, whose tensors nobody can take out; return tensors in tuples, "
                "lists, dicts, named tuples or dataclasses"
            )
        cut_off = mapped(lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex()), output)
        value = self._of_output_alone(cut_off, batch)
        weights = [p for p in self._model.parameters() if p.requires_grad]
        found = torch.autograd.grad(value, weights, allow_unused=True) if value.requires_grad else ()
        if any(gradient is not None for gradient in found):
            raise ValueError(
                "schedule: the loss reads the model's weights besides its output (a penalty, say), which no stage can "
                "see; use the optimizer's weight decay, or put the penalty into the model"
            )
        if torch.equal(value.detach(), whole):
            return
        inside, outside = self._call(batch).autocast, self._autocast()
        if inside != outside and (inside.enabled or outside.enabled):
            raise ValueError(
                f"schedule: the loss calls the model under {inside}, which begins inside of the loss; around it there "
                f"is {outside}. Stages run outside of the loss and would not see it: enter autocast around every "
                f"run.step instead, which reaches the forwards and the losses of its micro-batches"
            )
        raise ValueError(
            "schedule: the loss of the model's output is not the loss of the batch; it may call the model more than "
            "once. A schedule runs the model once a micro-batch"
        )

    def _of_output_alone(self, output: Any, batch: Batch) -> Tensor:
        """
        Raises:
            ValueError: the loss wants more than the output: the way back to what the model was given, for example.
        """
        try:
            return self.of_output(output, batch)
        except Exception as error:
            if str(error).startswith("schedule: "):
                raise
            raise ValueError(
                f"schedule: the loss fails on the model's output alone, which is all that it sees of a model that is "
                f"cut ({type(error).__name__}: {error}). A gradient of the output by the input (a gradient penalty) "
                "has no way back to there; compute it inside of the model's forward, in one module, or plan without a "
                "schedule that cuts"
            ) from error


@contextmanager
def scaler_refused() -> Iterator[None]:
    """Inside, a loss that is scaled by a GradScaler is refused; a scaler that is switched off is let through."""
    scale = torch.amp.GradScaler.scale

    def refuse(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if not scaler.is_enabled():
            return outputs
        raise ValueError(
            "schedule: the loss is scaled by a GradScaler; stages are stepped at different times, before anybody knows "
            "whether all gradients of the step are finite. Use bfloat16, which needs no scaling, or GradScaler(enabled="
            "False)"
        )

    torch.amp.GradScaler.scale = refuse  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign]


class _Noted(Exception):
    """The stand-in has been called."""


class _Call(NamedTuple):
    """What the model is called with, and the autocast that is on then."""

    given: tuple[Any, ...]
    autocast: Autocast


class _StandIn(nn.Module):
    """Has the model's parameters (for their dtype and device) and nothing else of it."""

    def __init__(self, model: nn.Module, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.answer = model, answer

    def forward(self, *given: Any, **named: Any) -> Any:
        if named:
            raise ValueError(
                f"schedule: the loss calls the model with {', '.join(named)}= by name; want positional arguments, "
                f"which is how stages pass values on"
            )
        return self.answer(*given)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(_only_called(name)) from None

    def __getitem__(self, place: Any) -> Any:
        raise AttributeError(_only_called(place))


def _only_called(name: Any) -> str:
    return f"schedule: the loss uses the model's {name!r}; under a schedule it may only call the model, once"
