"""What the fullest moment of a step adds to what a rank holds between steps.

It comes in backward or in the optimizer's pass. In backward there are activations with what kernels make of them (the
profile saw a plain step, with tables read by row and with tables read whole). Where some travel by row there are beside
them rows on their way and once more merged, and of tables that travel whole the largest gradient, since torch makes it
before it reaches its bucket. In the pass nothing of the batch is left, but some optimizers make temporaries of a whole
parameter.
"""

from collections.abc import Iterable

from armillary.exchanges.exchange import row_exchanges
from armillary.facts.group import Group
from armillary.planning.pricing import Case, row_work

__all__ = ["peak_bytes"]

TIMES_HELD = 2  # of rows that cross: as they travel, and merged


def peak_bytes(groups: Iterable[Group], case: Case) -> float:
    """Of the fullest rank, under a schedule that leaves the model whole."""
    profile, crossing, largest_gradient, largest_stepped = case.profile, 0.0, 0.0, 0.0
    for group in groups:
        facts = [profile.parameter(name) for name in group.parameters]
        if group.own_exchange.name in row_exchanges():
            work = row_work(facts[0], group.own_exchange, group.is_lazy, case, group.prefetch)
            crossing += TIMES_HELD * work.handled_rows * work.row_bytes
            largest_stepped = max(largest_stepped, work.touched_bytes if work.has_window else work.copy_bytes)
        else:
            largest_gradient = max([largest_gradient, *(fact.bytes for fact in facts if fact.shardable)])
            largest_stepped = max([largest_stepped, *(fact.bytes for fact in facts)])
    by_row = profile.peak_bytes + crossing + largest_gradient
    backward = by_row if crossing else max(profile.whole_step_bytes, profile.activation_bytes)
    return max(backward, case.assumptions.step_slots * largest_stepped)
