"""A model cut where a plan says: an `nn.Sequential` module by module, every other model by tracing its forward."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from armillary.facts.plan import Plan
from armillary.runtime.partition.stages import Stage, chain, cut, same_as_model
from armillary.runtime.partition.tracer import cut_traced
from armillary.runtime.profiling.probe import Loss
from armillary.runtime.profiling.untouched import untouched
from armillary.schedules.registry import options_of
from armillary.session.cyclic.split_loss import SplitLoss

__all__ = ["TracedInput", "refuse_other_groups", "refuse_uncut", "stages_of"]

Form = tuple[Any, ...]


def stages_of(model: nn.Module, value: Any, points: Sequence[str]) -> list[Stage]:
    """Stages that were seen to compute what the model does on `value`; a stage begins at every module of `points`.

    Without points the model is one stage, whatever its forward does.

    Raises:
        ValueError: a point that is none of the chain's modules; a model that cannot be traced, and which module
            stopped it; weights that two stages share; or stages that do not compute what the model does.
    """
    if isinstance(model, nn.Sequential):
        links = chain(model)
        paths = [path for path, _ in links]
        starts = [_first_at(point, paths) for point in points]
        stages = cut(model, links, starts)
        same_as_model(model, stages, value)
        return stages
    if not points:  # nothing to cut, nothing to trace
        return [Stage(0, _Called(model), {f"model.{name}": name for name, _ in model.named_parameters()})]
    with untouched(model), warnings.catch_warnings():
        # recurrent layers rewrite an attribute while they are traced; `untouched` puts it back
        warnings.filterwarnings("ignore", message="The tensor attributes? .* assigned during export")
        stages = cut_traced(model, value, points)
    try:
        same_as_model(_Called(model), stages, value)
    except TypeError as error:  # a part of the graph was made without one of its inputs
        loose = ", ".join(name for name, _ in model.named_parameters(recurse=False)) or "none"
        raise ValueError(
            f"stages: what torch's tracer made of {type(model).__name__} cannot be run ({error}); it loses values that "
            f"the forward reads in several places. Parameters outside every module: {loose}. Put them into modules, or "
            f"name the modules in an nn.Sequential; of the built-in workloads, vision is one that can be cut"
        ) from error
    return stages


def refuse_uncut(plan: Plan, model: nn.Module, loss: Loss, example: Any) -> None:
    """Before a plan is shown that could not be carried out.

    Raises:
        ValueError: the plan cuts the model, which cannot be cut there; in the words in which a run would say so.
    """
    if len(plan.stages) > 1:
        split = SplitLoss(loss, model, example)
        refuse_other_groups(plan, stages_of(model, split.input_of(example), options_of(plan).points))


def refuse_other_groups(plan: Plan, stages: Sequence[Stage]) -> None:
    """
    Raises:
        ValueError: the plan puts a parameter into another stage than the one that reads it.
    """
    read_in = {name: stage.index for stage in stages for name in stage.names.values()}
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
    return tuple((tuple(leaf.shape), leaf.dtype) if hasattr(leaf, "shape") else leaf for leaf in tree_leaves(value))


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
    """The model as a module from one value, as its stages are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, value: Any) -> Any:
        return self.model(*value) if isinstance(value, tuple) else self.model(value)


def _first_at(point: str, paths: Sequence[str]) -> int:
    for place, path in enumerate(paths):
        if path == point or path.startswith(f"{point}."):
            return place
    raise ValueError(f"schedule: no module {point!r} to cut at; the model applies {', '.join(paths)}")
