"""The ways one parameter may cross the workers, each with its price; dense buckets, and the peak of a step.

A table that is read by row has several ways. A parameter that some operation reads whole has one, unless the user
demands another. Constraints only take candidates away (or add the one they spell out), so what was forbidden can be
shown.

The peak of a step comes in backward or in the optimizer's pass. In backward there are activations with what kernels
make of them, rows on their way and once more merged, and of tables that travel whole the largest gradient. In the pass
nothing of the batch is left, but some optimizers make temporaries of a whole parameter.

A bucket leaves when its last gradient has arrived: small ones hide behind the backward, large ones pay latency less
often. On gloo over 1 Gbit/s, buckets of 2 MB hid half of what could be hidden, DDP's 25 MB a sixteenth (two workers, 40
MB of gradients). NCCL keeps DDP's sizes.

Source: Li et al., PyTorch Distributed (VLDB 2020), gradient bucketing.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from armillary.exchanges.exchange import build_dense, build_row, dense_exchanges, row_exchanges
from armillary.planning.constraints import LISTED, PLAIN, allows, layout_of, parallax, plain, why_not
from armillary.planning.demand import Constraint
from armillary.planning.pricing import Case, dense_forecast, row_forecast, row_work
from armillary.plans.group import Forecast, Group, Layout, checked
from armillary.plans.profile import ParameterFact
from armillary.plans.registry import Choice

__all__ = [
    "BucketLimits",
    "Candidate",
    "PeakPart",
    "Question",
    "allowed",
    "arrival_of",
    "buckets",
    "candidate",
    "candidates",
    "default_limits",
    "peak_bytes",
    "peak_of",
    "peak_part",
    "ruled",
]

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


MIB = 1 << 20


class BucketLimits(NamedTuple):
    """A bucket is closed once it holds this many bytes: the first of each dtype, and the others."""

    first_bytes: int
    bytes: int


def default_limits(backend: str) -> BucketLimits:
    return BucketLimits(MIB, 25 * MIB) if backend == "nccl" else BucketLimits(2 * MIB, 2 * MIB)


def arrival_of(fact: ParameterFact) -> float:
    """Place in the order of arrival; infinite without a gradient."""
    return float("inf") if fact.arrival is None else float(fact.arrival)


def buckets(facts: Iterable[ParameterFact], limits: BucketLimits) -> list[tuple[ParameterFact, ...]]:
    """Parameters of one dtype per bucket, in order of arrival; every bucket but a last one reaches its limit.

    Parameters whose gradient was never seen come in buckets of their own at the end: they would hold up any other.
    Buckets stand in the order in which they become complete.
    """
    if min(limits) < 1:
        raise ValueError(f"buckets: want at least 1 byte a bucket, got {limits.first_bytes} and {limits.bytes}")
    closed: list[tuple[ParameterFact, ...]] = []
    open_: dict[tuple[str, bool], list[ParameterFact]] = {}
    begun: set[tuple[str, bool]] = set()
    for fact in sorted(facts, key=arrival_of):
        kind = (fact.dtype, fact.arrival is None)
        bucket = open_.setdefault(kind, [])
        bucket.append(fact)
        if sum(member.bytes for member in bucket) >= (limits.bytes if kind in begun else limits.first_bytes):
            begun.add(kind)
            closed.append(tuple(open_.pop(kind)))
    closed += [tuple(bucket) for bucket in open_.values()]
    return sorted(closed, key=lambda bucket: max(arrival_of(fact) for fact in bucket))


@dataclass(frozen=True)
class Question:
    """What is to be decided.

    Args of note:
        wanted: what is demanded of parameters, by name. lazy: tables whose quiet rows may stay put.
    """

    case: Case
    wanted: Mapping[str, Constraint]
    lazy: frozenset[str]
    limits: BucketLimits

    @property
    def trained(self) -> tuple[ParameterFact, ...]:
        return tuple(fact for fact in self.case.profile.parameters if fact.requires_grad)


@dataclass(frozen=True)
class Candidate:
    """One way for one parameter. forecast: of the parameter alone; in a bucket it pays its part of the latency. peak:
    what it brings to the fullest moment of a step."""

    parameter: str
    choice: Choice
    departures: tuple[str, ...]
    forecast: Forecast
    peak: PeakPart

    @property
    def layout(self) -> Layout:
        return layout_of(self.choice)

    @property
    def is_row_sharded(self) -> bool:
        return self.layout == "row_sharded"


def candidate(fact: ParameterFact, choice: Choice, question: Question) -> Candidate:
    """One way, priced."""
    peak = peak_part(fact, choice, fact.name in question.lazy, question.case)
    if choice.name in row_exchanges():
        is_lazy = fact.name in question.lazy
        forecast = row_forecast(fact, choice, is_lazy, question.case)
        departs = build_row(choice.name, **choice.options).codes.departs
        return Candidate(fact.name, choice, checked([*departs, *["lazy"] * is_lazy]), forecast, peak)
    entry = dense_exchanges()[choice.name]
    part = 1.0 if entry.owner_option else min(1.0, fact.bytes / question.limits.bytes)
    return Candidate(fact.name, choice, entry.departs, dense_forecast([fact], choice, question.case, part), peak)


def candidates(fact: ParameterFact, question: Question) -> tuple[Candidate, ...]:
    """Every way that an exact exchange offers, and the one a constraint spells out if it is none of them: what departs
    from exact is demanded or not taken. Dense ways come first; among equals the first is taken.

    On one worker nothing crosses, so nothing is offered by row.
    """
    demanded, topology = question.wanted.get(fact.name), question.case.topology
    upkeep = question.case.assumptions.of(fact.name)
    by_row = fact.shardable and topology.workers > 1 and not upkeep.stays_whole
    exchanges = {**dense_exchanges(), **(row_exchanges() if by_row else {})}
    choices = [
        Choice(name, way)
        for name, entry in exchanges.items()
        for way in entry.offers(fact, topology)
        if (not entry.departs or name == demanded) and (name in row_exchanges() or not why_not(fact, Choice(name, way)))
    ]
    if upkeep.mixes_rows:
        choices = [choice for choice in choices if layout_of(choice) != "row_sharded"]
    if upkeep.lists_rows:
        choices = [LISTED, *(choice for choice in choices if choice.name in row_exchanges())]
    if isinstance(demanded, Choice) and demanded not in choices:
        choices.append(demanded)
    if isinstance(demanded, str) and not any(allows(demanded, choice) for choice in choices):
        choices.append(plain(demanded))
    return tuple(candidate(fact, choice, question) for choice in choices)


def ruled(fact: ParameterFact, question: Question) -> Choice:
    """Parallax's choice, where the parameter's optimizer can be split by row."""
    upkeep = question.case.assumptions.of(fact.name)
    if upkeep.lists_rows and not fact.shardable:
        return LISTED
    return PLAIN["replicated"] if upkeep.mixes_rows else parallax(fact)


def allowed(fact: ParameterFact, question: Question) -> tuple[Candidate, ...]:
    """The candidates that honour the user's constraint."""
    demanded = question.wanted.get(fact.name)
    return tuple(one for one in candidates(fact, question) if allows(demanded, one.choice))
