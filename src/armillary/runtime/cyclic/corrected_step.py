"""The optimizer's step of one stage, and the weights that stale micro-batches read of it, with a plan's corrections.

A stage that no micro-batch reads old is left alone. A drain forgets what corrections remember: the next step starts as
the first did, so a run goes on from a checkpoint as the one that wrote it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.cyclic.delayed_step import Options, step_with
from armillary.schedules.corrections.correction import Correction, stale_share
from armillary.schedules.schedule import Schedule

__all__ = ["CorrectedStep"]


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
