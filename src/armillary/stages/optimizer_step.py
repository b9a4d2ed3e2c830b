"""When the stages of a process are stepped: at once, or as soon as the norm is known by which the step is clipped.

A stage's gradient may be finished long before the norm over all stages is. It waits here with its step's learning rate,
and nothing reads the weights meanwhile: that is the schedule's to see to (`schedules/routes.py`), and a version
that is missing raises.

The optimizer's step of one stage, and the weights that stale micro-batches read of it, with a plan's corrections.

A stage that no micro-batch reads old is left alone. A drain forgets what corrections remember: the next step starts as
the first did, so a run goes on from a checkpoint as the one that wrote it.

One step of the user's optimizer for some parameters only, with the options of an earlier training step.

Under a staggered schedule the stages of one training step are updated at different times, when the user's scheduler may
have moved on. Rate, momentum and weight decay belong to the training step of the gradient, so they are kept from then.
The optimizer object stays the user's: it skips parameters without gradient, which here are all the others.

Options that an optimizer's own step changes, such as a counter in its groups: found by trying it, never by its type.

A stage is stepped with the options of its gradients' step, and those of before come back afterwards. So such a change
would be undone, or be made once a stage.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.schedules.clipping import Clip, square_of_stage
from armillary.schedules.corrections.correction import Correction, stale_share
from armillary.schedules.schedule import Schedule
from armillary.stages.partition import Stage
from armillary.stages.reducer import Means
from armillary.tables.optimizers import step_alone, tried_alone, twin_to_try

__all__ = [
    "CorrectedStep",
    "Options",
    "Stepped",
    "Updates",
    "changed_options",
    "clipped",
    "forget_others",
    "options_of",
    "own_options",
    "refuse_gradients",
    "refuse_own_options",
    "step_with",
]

Options = list[dict[str, Any]]  # per parameter group, everything but the parameters


def options_of(optimizer: Optimizer) -> Options:
    """The options of all groups as they are now; a learning rate that is a tensor is copied."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def step_with(optimizer: Optimizer, gradients: Mapping[nn.Parameter, Tensor], options: Options) -> None:
    """Steps the parameters of `gradients` under `options`; everything else stays as it is.

    Raises:
        RuntimeError: another parameter has a gradient, which this step would apply as well; or the step changed an
            option, which would be lost.
    """
    refuse_gradients(optimizer)
    kept = [dict(group) for group in optimizer.param_groups]
    for group, then in zip(optimizer.param_groups, options, strict=True):
        group.update(then)
    for parameter, gradient in gradients.items():
        # Fused optimizers walk over weight and gradient in the order of memory.
        parameter.grad = (
            torch.empty_like(parameter).copy_(gradient) if _lies_otherwise(gradient, parameter) else gradient
        )
    given = [dict(group) for group in optimizer.param_groups]
    optimizer.step()
    refuse_own_options(optimizer, given)
    for parameter in gradients:
        parameter.grad = None
    for group, now in zip(optimizer.param_groups, kept):
        group.update(now)


def refuse_own_options(optimizer: Optimizer, given: Options) -> None:
    """Of most optimizers that change their options this is found before training, by trying them; see `own_options`.

    Args:
        given: groups as they were just before the step.

    Raises:
        RuntimeError: the step has changed an option.
    """
    found = {name for group, then in zip(optimizer.param_groups, given) for name in changed_options(then, group)}
    if found:
        raise RuntimeError(
            f"delayed step: {type(optimizer).__name__} changed its options {', '.join(sorted(found))} by itself, and "
            "options are put back after each step. Take an optimizer that keeps such numbers in its state, or keep a "
            "loop of your own, by a plan without a schedule"
        )


def changed_options(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of those that are new or have another value."""
    return [name for name, value in after.items() if name not in before or not _same(before[name], value)]


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if isinstance(before, Tensor) or isinstance(after, Tensor):
        return isinstance(before, Tensor) and isinstance(after, Tensor) and torch.equal(before, after)
    return bool(before == after)


def _lies_otherwise(gradient: Tensor, parameter: nn.Parameter) -> bool:
    return gradient.stride() != parameter.stride()


def refuse_gradients(optimizer: Optimizer) -> None:
    """
    Raises:
        RuntimeError: a parameter has a gradient that no schedule made.
    """
    found = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if found:
        raise RuntimeError(
            f"delayed step: {len(found)} parameters of shapes {found[:3]} have gradients that no schedule made; "
            f"call optimizer.zero_grad(set_to_none=True), and leave backward to the schedule"
        )


class CorrectedStep:
    """
    Raises:
        ValueError: a correction that predicts one step, and weights read two steps old.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, stage: int, corrections: Sequence[Correction]) -> None:
        if corrections and max(ages[stage] for ages in schedule.staleness) > 1:
            raise ValueError(f"corrections: {schedule.name} reads stage {stage} more than a step old; want at most one")
        self._optimizer, self._share = optimizer, stale_share(schedule, stage)
        self._corrections = tuple(corrections) if self._share else ()
        self._before: Mapping[nn.Parameter, Tensor] = {}

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients of a step are looked at in the next one."""
        return any(correction.gradient is not None for correction in self._corrections)

    def step(self, means: Mapping[nn.Parameter, Tensor], options: Options) -> None:
        """As `step_with`, with the mean gradients of the stage."""
        gradients = dict(means)
        for correction in self._corrections:
            if correction.gradient is not None:
                for parameter in gradients.keys() & self._before.keys():
                    gradients[parameter] = correction.gradient(
                        gradients[parameter], self._before[parameter], self._share
                    )
        if self.keeps_gradients:
            self._before = {
                parameter: mean.clone() for parameter, mean in means.items()
            }  # a bucket may be filled again
        step_with(self._optimizer, gradients, self._changed(options))

    def _changed(self, options: Options) -> Options:
        for correction in self._corrections:
            if correction.step_options is not None:
                options = [dict(correction.step_options(group, self._share)) for group in options]
        return options

    def ahead(self, parameters: Mapping[str, nn.Parameter], options: Options) -> dict[str, Tensor]:
        """Leaves a step ahead of the parameters that a step with `options` has just made; none without such
        correction."""
        predicting = [correction.ahead for correction in self._corrections if correction.ahead is not None]
        if not predicting:
            return {}
        groups = zip(self._optimizer.param_groups, self._changed(options), strict=True)
        made_with = {parameter: then for group, then in groups for parameter in group["params"]}
        leaves = {}
        with torch.no_grad():
            for name, parameter in parameters.items():
                weight = parameter.detach().clone()
                for predict in predicting if parameter in made_with else ():
                    weight = predict(weight, self._optimizer.state.get(parameter, {}), made_with[parameter], 1)
                leaves[name] = weight.requires_grad_(parameter.requires_grad)
        return leaves

    def forget(self) -> None:
        """A drain."""
        self._before = {}


def own_options(optimizer: Optimizer) -> list[str]:
    """Their names, in any group. Empty also where the optimizer does not step a small matrix; then nobody knows."""
    return sorted({name for group in optimizer.param_groups if group["params"] for name in _changed(optimizer, group)})


def _changed(optimizer: Optimizer, group: dict[str, Any]) -> list[str]:
    for is_built in (False, True):  # some make their state in the constructor
        with tried_alone(), suppress(Exception):  # whatever stops it; a run will tell
            return list(_changed_by_steps(optimizer, group, is_built))
    return []


def _changed_by_steps(optimizer: Optimizer, group: dict[str, Any], is_built: bool) -> Iterator[str]:
    """Two steps with a gradient, and one without, as when other stages are stepped."""
    like = group["params"][0]
    matrix = nn.Parameter(torch.ones(6, 4, dtype=like.dtype, device=like.device))
    trial = twin_to_try(optimizer, group, [matrix], is_built)
    for gradient in (torch.ones_like(matrix), torch.ones_like(matrix), None):
        before = copy.deepcopy({name: value for name, value in trial.param_groups[0].items() if name != "params"})
        matrix.grad = gradient
        step_alone(trial)
        after = {name: value for name, value in trial.param_groups[0].items() if name != "params"}
        yield from changed_options(before, after)


class Stepped(Protocol):
    """The weights of one stage, as far as their steps go."""

    @property
    def newest(self) -> int:
        """The version there is."""

    def advance(self, gradients: Means, options: Options) -> None:
        """Makes the next one."""


def clipped(means: Means, square: Tensor, clip: Clip) -> Means:
    """The gradients multiplied by one factor, from the squared norm."""
    factor = clip.factor(square)
    return {parameter: gradient * factor for parameter, gradient in means.items()}


def forget_others(optimizer: Optimizer, stages: Sequence[Stage], owned: Collection[int]) -> None:
    """The optimizer loses the state of what no stage owned here holds."""
    kept = {parameter for stage in stages if stage.index in owned for parameter in stage.module.parameters()}
    for parameter in [one for stage in stages for one in stage.module.parameters() if one not in kept]:
        optimizer.state.pop(parameter, None)


class Updates:
    """Of the stages of one process.

    Args:
        drains: the run's own list; it grows.
    """

    def __init__(self, weights: Sequence[Stepped], clip: Clip | None, drains: Collection[int]) -> None:
        self._weights, self._clip, self._drains = weights, clip, drains
        self._options: dict[int, Options] = {}
        self._waiting: list[tuple[Stepped, int, Means]] = []
        self._squares: dict[int, Tensor] = {}  # of the norm over all stages, by step

    def begin(self, step: int, options: Options) -> None:
        """A step is handed in, with the optimizer's options of this moment."""
        if self._weights:
            self._options[step] = options

    def complete(self, weights: Stepped, step: int, means: Means) -> None:
        """A stage's gradients of a step are all there."""
        self._waiting.append((weights, step, means))
        self._advance()

    def know(self, step: int, square: Tensor) -> None:
        """The squared norm over all stages of a step."""
        self._squares = {s: kept for s, kept in self._squares.items() if s >= step - 1}
        self._squares[step] = square
        self._advance()

    @property
    def first_open(self) -> int:
        """The first step for which a stage here is still to be stepped."""
        return min((weights.newest for weights in self._weights), default=0)

    def _advance(self) -> None:
        waiting, self._waiting = self._waiting, []
        for weights, step, means in waiting:
            ready = self._clipped(step, means)
            if ready is None:
                self._waiting.append((weights, step, means))
            else:
                weights.advance(ready, self._options[step])
        self._options = {step: kept for step, kept in self._options.items() if step >= self.first_open}

    def _clipped(self, step: int, means: Means) -> Means | None:
        if self._clip is None:
            return means
        of = self._clip.step_of_norm(step, self._drains)
        square = square_of_stage(means.values()) if of is None else self._squares.get(of)
        return None if square is None else clipped(means, square, self._clip)
