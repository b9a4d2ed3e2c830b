"""A model and its loss as one stage, from a batch to the loss: of a schedule that leaves the model whole.

A model cut where a plan says: an `nn.Sequential` module by module, every other model by tracing its forward.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten

from armillary.models.preserved_state import untouched
from armillary.models.split_loss import SplitLoss, scaler_refused
from armillary.models.structure import take_apart
from armillary.plans.plan import Plan
from armillary.profiler.probe import Loss
from armillary.schedules.registry import options_of
from armillary.schedules.ties import complaint
from armillary.stages.partition import Stage, chain, cut, same_as_model, ties_between
from armillary.stages.tracer import cut_traced
from armillary.transport.point_to_point import form_of as form_of_nest

__all__ = [
    "TracedInput",
    "Whole",
    "cut_at",
    "refuse_other_groups",
    "refuse_ties",
    "refuse_uncut",
    "stages_of",
    "whole_stage",
]

Form = tuple[Any, ...]


def stages_of(model: nn.Module, given: tuple[Any, ...], points: Sequence[str]) -> list[Stage]:
    """As `cut_at`, and the stages were seen to compute what the model does on `given`.

    Raises:
        ValueError: as `cut_at`; stages that do not compute what the model does; or a value that cannot go from one to
            the next.
    """
    stages = cut_at(model, given, points)
    try:
        same_as_model(model, stages, given, lambda one: model(*one))
    except TypeError as error:  # a part of the graph was made without one of its inputs
        raise ValueError(
            f"stages: what torch's tracer made of {type(model).__name__} cannot be run ({error}). Name its modules in "
            "an nn.Sequential, which is cut without tracing, or plan without a schedule that cuts"
        ) from error
    _refuse_what_cannot_cross(model, stages, given)
    return stages


def cut_at(model: nn.Module, given: tuple[Any, ...], points: Sequence[str]) -> list[Stage]:
    """Stages of a model; one begins at every module of `points`. Without points it is one, whatever its forward does.

    Args:
        given: an example of the model's positional arguments, which the first stage reads.

    Raises:
        ValueError: a point that is none of the chain's modules; a model that cannot be traced, and which module
            stopped it.
    """
    if isinstance(model, nn.Sequential):
        links = chain(model)
        paths = [path for path, _ in links]
        first, *others = cut(model, links, [_first_at(point, paths) for point in points])
        return [_from_arguments(first), *others]
    if not points:  # nothing to cut, nothing to trace
        return [Stage(0, _Called(model), {f"model.{name}": name for name, _ in model.named_parameters()})]
    with untouched(model), warnings.catch_warnings():
        # recurrent layers rewrite an attribute while they are traced; `untouched` puts it back
        warnings.filterwarnings("ignore", message="The tensor attributes? .* assigned during export")
        return cut_traced(model, given, points)


def _from_arguments(stage: Stage) -> Stage:
    """The first stage of a chain: its module takes one value, and reads a model's arguments here."""
    names = {f"model.{local}": name for local, name in stage.names.items()}
    return replace(stage, module=_Called(stage.module), names=names)


def _refuse_what_cannot_cross(model: nn.Module, stages: Sequence[Stage], value: Any) -> None:
    """
    Raises:
        ValueError: a stage hands on what no message can carry.
    """
    with untouched(model), torch.no_grad():
        for stage in stages[:-1]:
            value = stage.module(value)
            try:
                form_of_nest(*tree_flatten(value)).to_json()
            except TypeError as error:
                raise ValueError(
                    f"{error}. Stage {stage.index} would hand that on; cut elsewhere (points=[...]), or return it as "
                    "one of these"
                ) from error


def refuse_uncut(plan: Plan, model: nn.Module, loss: Loss, example: Any) -> None:
    """Before a plan is shown that could not be carried out.

    Raises:
        ValueError: the plan cuts the model, which cannot be cut there; in the words in which a run would say so.
    """
    if len(plan.stages) > 1:
        split = SplitLoss(loss, model, example)
        options = options_of(plan)
        stages = stages_of(model, split.input_of(example), options.points)
        refuse_ties(plan, stages)
        refuse_other_groups(plan, stages)
        options.method.objectives.refuse_stages(options, [stage.module for stage in stages])


def refuse_ties(plan: Plan, stages: Sequence[Stage]) -> None:
    """
    Raises:
        ValueError: stages share a parameter, and the plan's schedule does not keep their copies alike.
    """
    for first, second in ties_between(stages):
        if said := complaint(options_of(plan), plan.workers, first, second):
            raise ValueError(said)


def refuse_other_groups(plan: Plan, stages: Sequence[Stage]) -> None:
    """
    Raises:
        ValueError: the plan puts a parameter into another stage than the one that reads it.
    """
    read_in = {name: stage.index for stage in reversed(stages) for name in stage.names.values()}
    for group in plan.groups:
        planned = group.stage
        for name in group.parameters:
            if read_in.get(name) != planned:
                raise ValueError(
                    f"schedule: the plan counts {name} in stage {planned}, the model reads it in stage "
                    f"{read_in.get(name, 'none')}; its modules are not called in the order in which they are defined. "
                    f"Name the cuts: points=[...], or profile(..., stages=[modules in the order of calls])"
                )


def form_of(value: Any) -> Form:
    """What a traced model was traced for: shapes and dtypes of the tensors it is called with, and the other values."""
    leaves = take_apart(value).leaves
    return tuple((tuple(leaf.shape), leaf.dtype) if hasattr(leaf, "shape") else leaf for leaf in leaves)


class TracedInput:
    """Lets only values of one form through: on another a traced stage might compute something else, silently."""

    def __init__(self, split: SplitLoss, example: Any) -> None:
        self._split, self._form = split, form_of(example)

    def input_of(self, batch: Any) -> Any:
        """
        Raises:
            ValueError: the batch has another form than the one the model was traced with.
        """
        value = self._split.input_of(batch)
        if form_of(value) != self._form:
            raise ValueError(
                f"schedule: the model was traced for a batch of {self._form} and gets one of {form_of(value)}; want "
                f"micro-batches of one shape (pad them, or drop the incomplete one)"
            )
        return value


class _Called(nn.Module):
    """A module that takes its arguments as one value, as stages do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: tuple[Any, ...]) -> Any:
        return self.model(*given)


def _first_at(point: str, paths: Sequence[str]) -> int:
    for place, path in enumerate(paths):
        if path == point or path.startswith(f"{point}."):
            return place
    raise ValueError(f"schedule: no module {point!r} to cut at; the model applies {', '.join(paths)}")


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
