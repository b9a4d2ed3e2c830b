"""A model trained by the truth of an exact schedule: the user's own `loss(model, batch)`, whole, in one process."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.facts.plan import Plan
from armillary.reference.whole_model import Loss, WholeModel
from armillary.schedules.registry import options_of
from armillary.session.workload import Batch

__all__ = ["WholeTruth", "is_whole"]


def is_whole(plan: Plan, draws: bool) -> bool:
    """Whether the whole model says all that a plan means; else part of it exists at the cuts only.

    Args:
        draws: whether a forward draws random numbers. A schedule seeds them stage by stage.
    """
    options = options_of(plan)
    at_cuts = options.edges or options.schedule().stale_share or options.schedule().uncoupled
    return not (draws or at_cuts or plan.departures)


class WholeTruth:
    """
    Args:
        plan: of the model, exact. model: it is trained in place, by `optimizer`, which is over its parameters.
        loss: of the whole model.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        options, named = options_of(plan), dict(model.named_parameters())
        stages = [
            [named[n] for one in plan.groups if one.stage == j for n in one.parameters] for j in range(options.stages)
        ]
        self._replicas = options.replicas(plan.workers)
        self._whole = WholeModel(model, optimizer, loss, self._replicas, stages, options.clip)
        self.drain = self._whole.drain

    def step(self, batches: Sequence[Batch]) -> None:
        """One training step. batches: its micro-batches, those of all processes, in their order."""
        each = len(batches) // self._replicas
        self._whole.step([batches[first : first + each] for first in range(0, len(batches), each)])

    def own_buffers(self) -> list[dict[str, Tensor]]:
        """By replica; empty where the model's own are all there are."""
        return self._whole.buffers if self._replicas > 1 else []
