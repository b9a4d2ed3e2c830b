"""A worker a process in a ring that keeps no weights: between looks a process holds those of its home stages only."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.cyclic.zero_loop import ZeroLoop
from armillary.session.engines.contract import ENGINES, Parts
from armillary.session.engines.plain_step import forward, learn
from armillary.session.workload import Batch

__all__ = ["ZeroRingEngine"]


class ZeroRingEngine:
    teller = None
    units = ()

    def __init__(self, parts: Parts) -> None:
        self.job, self._spread = parts.job, parts.transport.spread
        self._had_scaling = "_step_supports_amp_scaling" in vars(self.job.optimizer)
        self.runtime = ZeroLoop(
            self.job.model, parts.stages, self.job.optimizer, parts.course, parts.channel, parts.rank
        )

    @property
    def beside_bytes(self) -> float:
        """Weights and gradients that were here or on their way, beside those at home: the mean over actions."""
        return self.runtime.ring.mean_token_bytes

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

    def newest(self) -> AbstractContextManager[None]:
        return self.runtime.newest(self._spread)

    def detach(self) -> None:
        self.runtime.detach()
        if not self._had_scaling:
            vars(self.job.optimizer).pop("_step_supports_amp_scaling", None)


ENGINES.register("zero_ring", ZeroRingEngine)
