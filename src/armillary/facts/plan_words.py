"""A plan in a few words: what will be done with the parameters, and what a step is expected to take."""

from collections.abc import Sequence

from armillary.facts.choice import Choice
from armillary.facts.forecast import Forecast
from armillary.facts.group import Group
from armillary.facts.profile_table import count_text, seconds_text

__all__ = ["UNKNOWN", "expected_words", "number_of", "plan_words"]

UNKNOWN = "not known yet"
MOST_NAMES = 2  # more tables are counted
SAME = 0.001  # of a step: less is no difference


def plan_words(groups: Sequence[Group], workers: int, stages: int, schedule: Choice | None) -> str:
    """One sentence.

    Args:
        stages: how many the plan's table lists. schedule: None where the loop is the user's own.
    """
    by_way: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        by = "by the schedule" if group.exchange is None else f"by {group.exchange}"
        by_way.setdefault((group.layout, by), []).append(group)
    said = [_said(layout, by, those, stages) for (layout, by), those in by_way.items()]
    under = "" if schedule is None else f" under {schedule}"
    departures = sorted({word for group in groups for word in group.departures})
    exactness = f" NOT exact: {', '.join(departures)}." if departures else ""
    return f"{number_of(workers, 'worker')}{under}: {'; '.join(said)}.{exactness}"


def expected_words(total: Forecast, step_seconds: float, all_reduce_seconds: float, is_timed: bool) -> str:
    """
    Args:
        total: of the whole step, in which nothing is hidden.
        step_seconds, all_reduce_seconds: against a clock; 0 where nobody played them.
        is_timed: whether compute is known.
    """
    seconds = f"{seconds_text(step_seconds)} a step"
    if not is_timed:
        seconds = f"what a step takes is {UNKNOWN}"
    elif not step_seconds:
        seconds = f"{seconds_text(total.seconds)} a step if nothing of it hides behind compute"
    against = ""
    if step_seconds and all_reduce_seconds:
        plain = seconds_text(all_reduce_seconds)
        is_same = abs(step_seconds - all_reduce_seconds) <= SAME * all_reduce_seconds
        is_same = is_same or seconds_text(step_seconds) == plain
        against = f" (all-reduce of everything: {'the same' if is_same else plain})"
    sent, held = _bytes(total.sent_bytes), _mib(total.memory_bytes)
    peak = f", {_mib(total.memory_bytes + total.peak_bytes)} at most" if total.peak_bytes else ""
    return f"Expected: {seconds}{against}; a worker sends {sent} in it and holds {held} between steps{peak}."


def _said(layout: str, by: str, groups: Sequence[Group], stages: int) -> str:
    count = sum(len(group.parameters) for group in groups)
    if layout == "row_sharded":
        return f"{_named(groups)} sharded by row over the workers, {by}"
    if layout == "stage_sharded":
        where = "its stage" if count == 1 else f"their {number_of(stages, 'stage')}"
        return f"{number_of(count, 'parameter')} kept with {where}, {by}"
    return f"{number_of(count, 'parameter')} kept whole on every worker, in {number_of(len(groups), 'group')} {by}"


def _named(groups: Sequence[Group]) -> str:
    names = [name for group in groups for name in group.parameters]
    return " and ".join(names) if len(names) <= MOST_NAMES else number_of(len(names), "table")


def number_of(number: int, noun: str) -> str:
    """As in 1 worker, 2 workers."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _bytes(count: float) -> str:
    """In the units of the table: kB, MB, GB."""
    text = count_text(count)
    return f"{text}B" if text[-1].isalpha() else f"{text} B"


def _mib(count: float) -> str:
    return f"{count / (1 << 20):,.1f} MiB"
