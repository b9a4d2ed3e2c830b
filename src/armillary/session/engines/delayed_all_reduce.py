"""Nothing is cut: gradients are all-reduced while the next step computes. Every process has data of its own."""

from collections.abc import Sequence
from functools import partial

from torch import nn

from armillary.runtime.cyclic.delayed_all_reduce import DelayedAllReduce
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.schedules.clipping import Clip, square_of_stage, square_of_step
from armillary.schedules.random_stream import seeded
from armillary.session.engines.contract import ENGINES, Parts
from armillary.session.engines.plain_step import forward, learn
from armillary.session.feed import device_of
from armillary.session.workload import Batch

__all__ = ["DelayedEngine"]


class DelayedEngine:
    """Every process draws the random numbers of its own place."""

    teller = None
    units = ()

    def __init__(self, parts: Parts) -> None:
        self.job, self._place = parts.job, (parts.course.seed, parts.rank)
        named = dict(self.job.model.named_parameters())
        buckets = {group.name: [named[name] for name in group.parameters] for group in parts.plan.groups}
        clip = parts.options.clip
        clipping = () if clip is None else (partial(_clip_gradients, self.job.model, clip),)
        self.runtime = DelayedAllReduce(buckets, self.job.optimizer, parts.channel, parts.plan.workers, *clipping)
        self.newest, self.detach = self.runtime.newest, self.runtime.detach

    @property
    def beside_bytes(self) -> float:
        """Gradients under way."""
        return float(sum(flat.nbytes for flat in self.runtime.flat_tensors))

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        step, (seed, worker) = self.runtime.steps, self._place
        with seeded(seed, (step, worker, 0), device_of(self.job.model)):
            value = forward(self.job, batches[0])
        learn(self.job, value)
        return [StepLosses(step, (value.detach(),))]

    def settle(self) -> list[StepLosses]:
        self.runtime.settle()
        return []

    def drain(self) -> list[StepLosses]:
        self.runtime.drain()
        return []


def _clip_gradients(model: nn.Module, clip: Clip) -> None:
    """By the norm over all parameters, in the model's order, which is one process's."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    factor = clip.factor(square_of_step({0: square_of_stage(gradients)}))
    for gradient in gradients:
        gradient.mul_(factor)


ENGINES.register("delayed_all_reduce", DelayedEngine)
