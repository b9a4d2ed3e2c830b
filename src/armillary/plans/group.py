"""The rows of a plan's tables: groups of parameters that cross together, and stages of the model; with their forecasts.

A plan without stages has one, with every default. Groups say by number which stage their parameters are in.

A departure is a word, with one sentence, for how training under a plan may differ from training in one process. A group
lists the words that are true of it; none means exact. Methods state their own words in their registry entries, so
nobody else judges a method by its name. What departs is never taken by price.

A `Band` says how far a run may lie from its forecast and still be as it was foreseen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Literal, get_args

from armillary.plans.registry import Choice

__all__ = [
    "DEPARTURES",
    "EXACT",
    "PREFETCH_KINDS",
    "Band",
    "Cadence",
    "Forecast",
    "Group",
    "Layout",
    "PrefetchKind",
    "StagePlan",
    "checked",
]


@dataclass(frozen=True)
class Forecast:
    """
    Args of note:
        sent_bytes: mean over workers.
        memory_bytes: of the fullest worker, between steps (weights, gradients, optimizer state).
        seconds: requests, index work and the optimizer's pass, none of it hidden behind anything.
        peak_bytes: what the fullest moment of a step adds to memory_bytes, such as activations and temporaries.
        moved_bytes: to slower memory and back, such as activations that are swapped to the host.
    """

    sent_bytes: float = 0.0
    memory_bytes: float = 0.0
    seconds: float = 0.0
    peak_bytes: float = 0.0
    moved_bytes: float = 0.0

    def __add__(self, other: "Forecast") -> "Forecast":
        return Forecast(
            self.sent_bytes + other.sent_bytes,
            self.memory_bytes + other.memory_bytes,
            self.seconds + other.seconds,
            self.peak_bytes + other.peak_bytes,
            self.moved_bytes + other.moved_bytes,
        )


@dataclass(frozen=True)
class StagePlan:
    """
    Args of note:
        begins: path of its first module.
        residency: where its activations stay between forward and backward: "keep" or "recompute" today.
        objective: what it learns from: "whole_model", the loss of the whole model, or "own_loss", which its schedule
            names.
        edge, edge_back: codecs of what it hands to the next stage and gets back; None: as it is.
        split: over which axes its tensors lie; reserved, "whole" today.
        forecast: its own seconds of forward and backward, and peak_bytes of activations, on one worker.
    """

    begins: str
    residency: Choice = Choice("keep")
    objective: Choice = Choice("whole_model")
    edge: Choice | None = None
    edge_back: Choice | None = None
    split: Choice = Choice("whole")
    forecast: Forecast = Forecast()
    reason: str = ""


EXACT = "as in one process"

DEPARTURES: Mapping[str, str] = MappingProxyType(
    {
        "stale": "NOT exact: gradients are taken at weights at most one step old",
        "lazy": "NOT exact: rows without gradient stay put, though the optimizer may have moved them",
        "lossy": "NOT exact: what crosses is rounded or thinned",
        "uncoupled": "NOT exact: stages learn from losses of their own instead of the next one's gradient",
        "local": "NOT exact: replicas train alone between their meetings",
        "event": "NOT exact: replicas send only what has changed enough",
        "async": "NOT exact: nobody waits for the others; a log can replay what happened",
    }
)


def checked(words: Iterable[str]) -> tuple[str, ...]:
    """The words in the registry's order, each once.

    Raises:
        ValueError: a word that is none of `DEPARTURES`.
    """
    given = set(words)
    if strange := sorted(given - DEPARTURES.keys()):
        raise ValueError(f"departures: {', '.join(strange)} unknown; want some of {', '.join(DEPARTURES)}")
    return tuple(word for word in DEPARTURES if word in given)


Layout = Literal["replicated", "row_sharded", "stage_sharded"]
Cadence = Literal["step", "meeting"]
PrefetchKind = Literal["none", "ids", "rows", "gradients"]

PREFETCH_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "ids": "in a loop over run.batches, ids of prefetched look-ups go two batches early, their rows right after "
        "the step; exact",
        "rows": "as ids, and rows that no rank touches at a step go before it; exact",
        "gradients": "as rows, and gradients of rows that no rank reads in the next batch follow during it; exact",
    }
)


@dataclass(frozen=True)
class Group:
    """
    Args of note:
        layout: how it lies over the workers: "replicated", whole on each; "row_sharded", rows dealt out to owners;
            "stage_sharded", whole with the workers of its stage.
        exchange: a dense or row exchange; None where the schedule's own messages carry the group.
        stage: number of the stage that it belongs to.
        cadence: "step", it is exchanged in every step; "meeting", only in some, as its exchange says.
        departures: words of `DEPARTURES`; empty: exact.
        prefetch: what of a table's pulls leaves one batch early in a loop over `run.batches` (see `PREFETCH_KINDS`).
        reason: the planner's sentence for the reader.
    """

    name: str
    parameters: tuple[str, ...]
    layout: Layout
    exchange: Choice | None
    stage: int = 0
    cadence: Cadence = "step"
    departures: tuple[str, ...] = ()
    forecast: Forecast = Forecast()
    reason: str = ""
    prefetch: PrefetchKind = "none"

    @property
    def own_exchange(self) -> Choice:
        """
        Raises:
            ValueError: it has none, since the schedule's own messages carry it.
        """
        if self.exchange is None:
            raise ValueError(f"plan: group {self.name!r} has no exchange; the plan's schedule carries it")
        return self.exchange

    @property
    def is_lazy(self) -> bool:
        """Whether only rows with a gradient move, whatever the optimizer would do to the others."""
        return "lazy" in self.departures

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError(f"plan: group {self.name!r} holds no parameter")
        if self.layout not in get_args(Layout):
            raise ValueError(
                f"plan: group {self.name!r}: layout {self.layout!r} is none of {', '.join(get_args(Layout))}"
            )
        if self.layout == "row_sharded" and len(self.parameters) != 1:
            raise ValueError(f"plan: group {self.name!r} is row_sharded and must hold one table, got {self.parameters}")
        if self.stage < 0 or self.cadence not in get_args(Cadence):
            raise ValueError(
                f"plan: group {self.name!r}: want stage >= 0 and cadence step or meeting, got {self.stage}, "
                f"{self.cadence!r}"
            )
        object.__setattr__(self, "departures", checked(self.departures))
        if self.prefetch != "none" and (self.prefetch not in PREFETCH_KINDS or self.layout != "row_sharded"):
            raise ValueError(
                f"plan: group {self.name!r} is {self.layout}: prefetch {self.prefetch!r}; want none, or for a "
                f"row_sharded group one of {sorted(PREFETCH_KINDS)}"
            )


# Of what the band leaves to the whole step: as much of it may a group use up that is out by more than its own band.
# With the default bands: 0.1 % of the step's bytes, which are counted, and 1 % of its memory and of its seconds.
SMALL_PARTS = {"sent_bytes": 1 / 20, "memory_bytes": 1 / 10, "seconds": 1 / 15}


@dataclass(frozen=True)
class Band:
    """Largest difference between forecast and measured, as a share of the larger of the two.

    decided_bytes: instead of sent_bytes, where the data decide how much is sent.
    """

    sent_bytes: float = 0.02
    memory_bytes: float = 0.10
    seconds: float = 0.15
    decided_bytes: float = 0.30

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in asdict(self).items() if not 0 <= value <= 1}
        if wrong:
            raise ValueError(f"compare: a band is a share between 0 and 1, got {wrong}")

    @property
    def small(self) -> Forecast:
        """Shares of the whole step: differences of a group below them are let pass."""
        return Forecast(**{name: part * getattr(self, name) for name, part in SMALL_PARTS.items()})
