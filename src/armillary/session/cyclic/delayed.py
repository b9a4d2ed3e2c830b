"""A plan with a delayed all-reduce at work: nothing is cut, the loss is called whole, every process has own data."""

from collections.abc import Iterator, Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from armillary.facts.plan import Plan
from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.autocast import without_autocast
from armillary.runtime.cyclic.delayed_all_reduce import DelayedAllReduce
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.cyclic.twin_bucket import Requests
from armillary.runtime.watch.probe import Loss
from armillary.schedules.clipping import Clip, square_of_stage, square_of_step
from armillary.schedules.delayed_all_reduce import BY, DelayedOptions
from armillary.schedules.random_stream import seeded
from armillary.session.feed import device_of
from armillary.session.workload import Batch

__all__ = ["DelayedMode", "delayed_runtime", "one_stage", "unfit_groups"]


class DelayedMode:
    """The user's plain loop, which the runtime's hooks follow. Every process draws the numbers of its own place."""

    def __init__(self, runtime: DelayedAllReduce, training: tuple[nn.Module, Optimizer, Loss], place: tuple[int, int]):
        """place: the run's seed, and this process's worker."""
        self.runtime, self.newest = runtime, runtime.newest
        self._model, self._optimizer, self._loss = training
        self._seed, self._worker = place

    @property
    def held_bytes(self) -> int:
        """Of gradients between two steps."""
        return sum(flat.nbytes for flat in self.runtime.flat_tensors)

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        step = self.runtime.steps
        with seeded(self._seed, (step, self._worker, 0), device_of(self._model)):
            value = self._loss(self._model, batches[0])
        with without_autocast(value.device.type):
            value.backward()
            self._optimizer.step()
        return [StepLosses(step, (value.detach(),))]

    def settle(self) -> list[StepLosses]:
        self.runtime.settle()
        return []

    def drain(self) -> list[StepLosses]:
        self.runtime.drain()
        return []


def one_stage(model: nn.Module) -> list[Stage]:
    """The model whole."""
    return [Stage(0, model, {name: name for name, _ in model.named_parameters()})]


def unfit_groups(plan: Plan, model: nn.Module) -> Iterator[str]:
    """What an edited plan's groups ask for that cannot be done."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for group in plan.groups:
        if group.exchange != BY:
            yield f"group {group.name!r} goes by {group.exchange}; a delayed all-reduce knows {BY} only"
        kinds = sorted({f"{trained[name].dtype} on {trained[name].device}" for name in group.parameters})
        if len(kinds) > 1:
            yield f"group {group.name!r} holds {' and '.join(kinds)}, which do not fit in one bucket; split the group"


def delayed_runtime(
    plan: Plan, options: DelayedOptions, model: nn.Module, optimizer: Optimizer, requests: Requests
) -> DelayedAllReduce:
    """The groups of a plan as buckets, with the clipping it says."""
    named = dict(model.named_parameters())
    buckets = {group.name: [named[name] for name in group.parameters] for group in plan.groups}
    clip = options.clip
    if clip is None:
        return DelayedAllReduce(buckets, optimizer, requests, plan.workers)
    return DelayedAllReduce(buckets, optimizer, requests, plan.workers, partial(_clip_gradients, model, clip))


def _clip_gradients(model: nn.Module, clip: Clip) -> None:
    """By the norm over all parameters, in the model's order, which is one process's."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    factor = clip.factor(square_of_step({0: square_of_stage(gradients)}))
    for gradient in gradients:
        gradient.mul_(factor)
