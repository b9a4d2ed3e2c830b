"""How large buckets may be, and which size a plan takes: the smallest that a clock finds about the fastest.

Small buckets hide behind the backward pass. Where links are about as fast as memory, or the backward is short, what
each of them costs (a message to every rank, work on a processor that computes) is more than what it hides. Prices hide
nothing, so they cannot say; the simulator can.

Source: Li et al., PyTorch Distributed (VLDB 2020): the size of buckets as a trade, there set by hand.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from armillary.exchanges.exchange import dense_exchanges
from armillary.facts.plan import Choice, Plan
from armillary.facts.profile_table import seconds_text
from armillary.planning.buckets import MIB, BucketLimits, default_limits
from armillary.planning.pricing import Case
from armillary.planning.simulator import simulate

__all__ = ["by_clock", "counted", "is_ownerless", "sizes"]

LARGE = BucketLimits(25 * MIB, 25 * MIB)  # DDP's
ONE = BucketLimits(sys.maxsize, sys.maxsize)
CLOSE = 0.005  # of a step: less is no difference


def sizes(backend: str) -> tuple[BucketLimits, ...]:
    """Smallest first."""
    return tuple(dict.fromkeys([default_limits(backend), LARGE, ONE]))


def by_clock(plans: Sequence[Plan], case: Case) -> tuple[Plan, ...]:
    """The first of them whose simulated step is about as short as any, then the others, each once. It has a note of
    it, if their steps differ in what is printed.

    Args:
        plans: the same in buckets of several sizes, smallest first.
    """
    found: dict[tuple[tuple[str, ...], ...], Plan] = {}
    for plan in plans:
        found.setdefault(tuple(group.parameters for group in plan.groups), plan)
    ordered = list(found.values())
    if len(ordered) == 1:
        return tuple(ordered)
    seconds = [simulate(plan, case).step_seconds for plan in ordered]
    shortest = min(seconds)
    compute = sum(stage.forward_seconds + stage.backward_seconds for stage in case.profile.stages)
    scatter = case.topology.scatter * max(0.0, shortest - compute)  # of what exchanges add to it
    taken = next(i for i, spent in enumerate(seconds) if spent <= (1 + CLOSE) * shortest + scatter)
    others = *ordered[:taken], *ordered[taken + 1 :]
    if len(set(map(seconds_text, seconds))) == 1:
        return ordered[taken], *others
    steps = (f"in {counted(plan)} {seconds_text(spent)}" for plan, spent in zip(ordered, seconds, strict=True))
    note = f"whole parameters travel in {counted(ordered[taken])}; simulated step {', '.join(steps)}"
    first = replace(ordered[taken], notes=(*ordered[taken].notes, note))
    return first, *others


def counted(plan: Plan) -> str:
    """How many buckets, in words."""
    count = sum(is_ownerless(group.own_exchange) for group in plan.groups)
    return f"{count} bucket{'s' * (count != 1)}"


def is_ownerless(choice: Choice) -> bool:
    """Whether it moves buckets alike on all ranks."""
    entry = dense_exchanges().get(choice.name)
    return entry is not None and not entry.owner_option
