"""A worker a process; gradients and weights go from hand to hand. Every worker keeps the whole model."""

from collections.abc import Sequence

from armillary.runtime.cyclic.ring_loop import RingLoop
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.session.engines.contract import ENGINES, Parts
from armillary.session.engines.plain_step import forward, learn
from armillary.session.workload import Batch

__all__ = ["RingEngine"]


class RingEngine:
    teller = None
    beside_bytes = 0.0

    def __init__(self, parts: Parts) -> None:
        self.job = parts.job
        self._had_scaling = "_step_supports_amp_scaling" in vars(self.job.optimizer)
        self.runtime = RingLoop(
            self.job.model, parts.stages, self.job.optimizer, parts.course, parts.channel, parts.rank
        )
        self.newest, self._detach = self.runtime.newest, self.runtime.detach

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        step = self.runtime.ring.steps
        self.job.optimizer.zero_grad(set_to_none=True)
        value = forward(self.job, batches[0])
        learn(self.job, value)
        return [StepLosses(step, (value.detach(),))]

    def settle(self) -> list[StepLosses]:
        self.runtime.settle()
        return []

    def drain(self) -> list[StepLosses]:
        self.runtime.drain()
        return []

    def detach(self) -> None:
        self._detach()
        if not self._had_scaling:
            vars(self.job.optimizer).pop("_step_supports_amp_scaling", None)


ENGINES.register("ring", RingEngine)
