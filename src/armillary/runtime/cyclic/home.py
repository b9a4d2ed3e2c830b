"""The stages a worker is home to: their master weights and their optimizer state, which nobody else holds.

The user's optimizer is given master copies in place of this worker's home parameters, and loses the others. So its
`step` moves nothing but what the ring has put gradients on, its state exists once in the world, and its groups, and
whatever schedules their rates, stay the user's. The model's own parameters become this worker's working copies.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.cyclic.autocast import device_type_of, without_autocast
from armillary.runtime.cyclic.delayed_step import Options, step_with
from armillary.runtime.cyclic.flat_stage import FlatStage
from armillary.runtime.cyclic.step_means import Means

__all__ = ["Home"]


class Home:
    """Lives as long as the run.

    Args:
        stages: every stage's layout; their parameters are the model's.
        owned: which of them have their home here.

    flats: the newest weights of every stage at home here, to be read; a step changes them in place.

    Raises:
        ValueError: the optimizer steps a parameter that is in no stage.
    """

    def __init__(self, optimizer: Optimizer, stages: Mapping[int, FlatStage], owned: frozenset[int]) -> None:
        self.owned, self.stepping = owned, False
        self._optimizer, self._stages = optimizer, stages
        self.flats = {j: stages[j].pack_weights(stages[j].parameters) for j in owned}  # the masters' own storage
        self._masters: dict[int, list[nn.Parameter]] = {
            j: [nn.Parameter(weight) for weight in stages[j].unpack_weights(self.flats[j])] for j in owned
        }
        known = {id(p) for stage in stages.values() for p in stage.parameters}
        masters = {id(p): m for j in owned for p, m in zip(stages[j].parameters, self._masters[j])}
        for group in optimizer.param_groups:
            strange = [tuple(p.shape) for p in group["params"] if p.requires_grad and id(p) not in known]
            if strange:
                raise ValueError(f"ring: the optimizer steps {len(strange)} parameters of no stage, shapes {strange}")
        for group in optimizer.param_groups:
            self._replace(group, masters)

    def _replace(self, group: dict[str, Any], masters: Mapping[int, nn.Parameter]) -> None:
        kept = [place for place, p in enumerate(group["params"]) if id(p) in masters]
        for parameter in group["params"]:
            state = self._optimizer.state.pop(parameter, None)
            if state is not None and id(parameter) in masters:
                self._optimizer.state[masters[id(parameter)]] = state
        if "param_names" in group:
            group["param_names"] = [group["param_names"][place] for place in kept]
        group["params"] = [masters[id(group["params"][place])] for place in kept]

    def means(self, stage: int, total: list[Tensor], workers: int) -> Means:
        """The summed gradients, divided in place by the number of workers, of the master weights."""
        sums = self._stages[stage].unpack_gradients(total)
        return {self._masters[stage][place]: sums[place].div_(workers) for place in sorted(sums)}

    def copy(self, stage: int) -> list[Tensor]:
        """The newest weights of a stage, flat."""
        return [flat.clone() for flat in self.flats[stage]]

    def step(self, stage: int, gradients: Means, options: Options) -> None:
        """Steps with these gradients of a stage's master weights."""
        self.stepping = True
        try:
            with torch.no_grad(), without_autocast(device_type_of(self._masters[stage])):
                step_with(self._optimizer, gradients, options)
        finally:
            self.stepping = False
