"""A model and its loss as one stage, from a batch to the loss: of a schedule that leaves the model whole."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from armillary.facts.split_loss import scaler_refused
from armillary.facts.untouched import untouched
from armillary.runtime.partition.stages import Stage
from armillary.runtime.profiling.probe import Loss

__all__ = ["Whole", "whole_stage"]


class Whole(nn.Module):
    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self._loss = model, (loss,)  # which may be a module, with parameters of its own

    def forward(self, batch: Any) -> Tensor:
        return self._loss[0](self.model, batch)


def whole_stage(model: nn.Module, loss: Loss, example: Any) -> Stage:
    """
    Raises:
        ValueError: the loss is scaled, or reads parameters of the model in another way than through the model that it
            is given: a step reads weights of a certain age, which are handed to the model for that long.
    """
    stage = Stage(0, Whole(model, loss), {f"model.{name}": name for name, _ in model.named_parameters()})
    named = dict(model.named_parameters())
    leaves = {f"model.{name}": p.detach().requires_grad_(p.requires_grad) for name, p in named.items()}
    with untouched(model), scaler_refused():
        value = functional_call(stage.module, leaves, (example,))
    reached = set(_leaves_of(value))
    if beside := [name for name, parameter in named.items() if parameter in reached]:
        raise ValueError(
            f"schedule: the loss reads {', '.join(beside[:3])} beside the model that it is given (a list of parameters "
            "kept elsewhere?), whose weights may be of another age; read them from loss's own model argument, or keep "
            "a loop of your own: attach(plan, model, optimizer) without loss"
        )
    return stage


def _leaves_of(value: Any) -> Iterator[Tensor]:
    """The tensors that a backward of the value gives gradients to."""
    first = value.grad_fn if isinstance(value, Tensor) else None
    waiting, seen = [first] if first is not None else [], set[Any]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        waiting += [after for after, _ in node.next_functions if after is not None]
