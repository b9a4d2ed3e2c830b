"""Parameters that cross the workers together: one row of a plan's group table."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from armillary.facts.choice import Choice
from armillary.facts.departure import checked
from armillary.facts.forecast import Forecast

__all__ = ["PREFETCH_KINDS", "Cadence", "Group", "Layout", "PrefetchKind"]

Layout = Literal["replicated", "row_sharded", "stage_sharded"]
Cadence = Literal["step", "meeting"]
PrefetchKind = Literal["none", "ids", "rows"]

PREFETCH_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "ids": "in a loop over run.batches, ids of prefetched look-ups go two batches early, their rows right after "
        "the step; exact",
        "rows": "as ids, and rows that no rank touches at a step go before it; exact",
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
