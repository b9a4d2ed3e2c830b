"""What carries out a schedule that leaves the model whole behind the user's own loop, where nobody gave the loss."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

from torch import Tensor, nn

from armillary.runtime.cyclic.own_loop import OwnLoop, unchanged
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.cyclic.step_means import Means
from armillary.runtime.cyclic.updates import clipped
from armillary.runtime.hybrid.drift import alike
from armillary.schedules.clipping import Clip, square_of_stage
from armillary.session.engines.contract import Parts
from armillary.session.engines.replicas import beside_bytes, replicas_of
from armillary.session.workload import Batch

__all__ = ["OwnLoopEngine"]


class OwnLoopEngine:
    teller = None

    def __init__(self, parts: Parts, before_step: Callable[[], None], after_step: Callable[[], None]) -> None:
        """before_step, after_step: called when a step of the loop begins, and when it is over."""
        clip, within = parts.options.clip, partial(parts.transport.within, "backward")
        change = unchanged if clip is None else partial(_clipped, clip, list(parts.job.model.parameters()))
        replicas = replicas_of(parts)
        self.units = [unit for units in replicas.groups.values() for unit in units]
        reducer = replicas.reducer(0, is_late=True)
        self.runtime = OwnLoop(reducer, parts.job.optimizer, change, after_step, within, before_step)
        self.newest, self.detach = self.runtime.newest, self.runtime.detach

    @property
    def beside_bytes(self) -> float:
        return beside_bytes(self.units)

    def given(self, batches: Sequence[Batch]) -> NoReturn:
        raise ValueError(
            "run.step: nobody said what the loss is; give loss=loss(model, batch) and example=batch to attach, or keep "
            "a loop of your own: backward, optimizer.step()"
        )

    step = given

    def settle(self) -> list[StepLosses]:
        self.runtime.settle()
        return []

    def alike(self) -> Mapping[str, Tensor]:
        return dict(alike(self.units))

    def drain(self) -> list[StepLosses]:
        self.runtime.drain()
        return []


def _clipped(clip: Clip, parameters: Sequence[nn.Parameter], means: Means) -> Means:
    """By the norm over all parameters, in the model's order, which is one process's."""
    return clipped(means, square_of_stage(means[one] for one in parameters if one in means), clip)
