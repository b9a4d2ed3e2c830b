"""Which kind of prefetch a plan wants: the one place that knows all there are."""

from collections.abc import Sequence

from torch.optim import Optimizer

from armillary.plans.plan import Plan
from armillary.prefetch.batches import WATCHED_DRAWS
from armillary.prefetch.delayed_gradients import DelayedGradients, can_split
from armillary.prefetch.prefetcher import DEPTH, Prefetcher
from armillary.tables.lookups import NoDelay, NoPrefetch, Prefetch
from armillary.tables.optimizers import members
from armillary.tables.table import RowTable
from armillary.transport.transport import Transport

__all__ = ["prefetch_of", "steps_to_learn"]


def prefetch_of(plan: Plan, tables: Sequence[RowTable], optimizer: Optimizer, transport: Transport) -> Prefetch:
    """For these tables of the plan, in launch order."""
    kinds = {group.parameters[0]: group.prefetch for group in plan.groups if group.prefetch != "none"}
    if not kinds:
        return NoPrefetch()
    pulled = [table for table in tables if table.is_pulled]
    if "gradients" not in kinds.values():
        return Prefetcher(pulled, kinds, transport, NoDelay())
    is_one = len(members(optimizer)) == 1
    whole = {t.name for t in tables if t.has_window and not (is_one and can_split(optimizer, t))}
    return Prefetcher(pulled, kinds, transport, DelayedGradients(kinds, transport, whole))


def steps_to_learn(plan: Plan) -> int:
    """Steps of a loop of which nothing is predicted yet."""
    return WATCHED_DRAWS + DEPTH if plan.looks_ahead else 0
