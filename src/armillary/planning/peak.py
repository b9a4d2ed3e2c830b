"""What the fullest moment of a step adds to what a rank holds between steps.

It comes in backward or in the optimizer's pass. In backward there are activations with what kernels make of them (the
profile saw a plain step, with tables read by row and with tables read whole). Where some travel by row there are beside
them rows on their way and once more merged, and of tables that travel whole the largest gradient, since torch makes it
before it reaches its bucket. In the pass nothing of the batch is left, but some optimizers make temporaries of a whole
parameter.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from armillary.exchanges.exchange import build_dense, row_exchanges
from armillary.facts.group import Group
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice
from armillary.planning.pricing import Case, row_work

__all__ = ["PeakPart", "peak_bytes", "peak_of", "peak_part"]

TIMES_HELD = 2  # of rows that cross: as they travel, and merged


@dataclass(frozen=True)
class PeakPart:
    """What one parameter brings to the fullest moment of a step.

    Args of note:
        crossing_bytes: rows on their way and merged. gradient_bytes: a gradient that torch makes whole.
        step_bytes: temporaries of the optimizer's step on it. absent_bytes: of what its group holds, what is not there
            in the fullest moment of backward: gradients beside weights that are sent, which come as activations go.
    """

    crossing_bytes: float
    gradient_bytes: float
    step_bytes: float
    absent_bytes: float = 0.0


def peak_part(fact: ParameterFact, choice: Choice, is_lazy: bool, case: Case) -> PeakPart:
    """Of one way for a parameter; prefetch changes nothing of it."""
    temporaries = case.assumptions.of(fact.name).step_slots
    if choice.name not in row_exchanges():
        is_sent = build_dense(choice.name, **choice.options).carries == "weights"
        gradient = fact.bytes if fact.shardable else 0.0
        return PeakPart(0.0, gradient, temporaries * fact.bytes, fact.bytes if is_sent else 0.0)
    work = row_work(fact, choice, is_lazy, case)
    stepped = work.touched_bytes if work.has_window else work.copy_bytes
    return PeakPart(TIMES_HELD * work.handled_rows * work.row_bytes, 0.0, temporaries * stepped)


def peak_of(parts: Collection[PeakPart], case: Case, batch_share: float = 1.0) -> float:
    """
    Args:
        parts: of all trained parameters. batch_share: of the activations of a batch, as of a smaller one.
    """
    profile = case.profile
    crossing = sum(part.crossing_bytes for part in parts)
    spared = (1 - batch_share) * profile.peak_bytes + sum(part.absent_bytes for part in parts)
    by_row = (
        max(0.0, profile.peak_bytes - spared) + crossing + max((part.gradient_bytes for part in parts), default=0.0)
    )
    by_whole = max(0.0, max(profile.whole_step_bytes, profile.activation_bytes) - spared)
    stepped = max((part.step_bytes for part in parts), default=0.0)
    return max(by_row if crossing else by_whole, stepped)


def peak_bytes(groups: Iterable[Group], case: Case) -> float:
    """Of the fullest rank, under a schedule that leaves the model whole."""
    parts = [
        peak_part(case.profile.parameter(name), group.own_exchange, group.is_lazy, case)
        for group in groups
        for name in group.parameters
    ]
    return peak_of(parts, case)
