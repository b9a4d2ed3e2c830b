"""A plan on paper: words, groups in launch order, stages, totals, departures, reasons, notes.

One unit a column, so that numbers can be compared down the page. A column stands only where some row differs from its
default. Reasons are sentences, so they stand below the table. `plan_words` and `expected_words` say a plan in a
sentence.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from armillary.plans.group import DEPARTURES, EXACT, Forecast, Group, StagePlan
from armillary.plans.registry import Choice
from armillary.plans.units import Page, Table, count_text, seconds_text

__all__ = ["REWRITTEN", "UNKNOWN", "expected_words", "number_of", "plan_page", "plan_words"]

UNKNOWN = "not known yet"
REWRITTEN = "NOT exact: forward writes into"  # how a note begins that speaks of a model, whatever its exchanges are
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
    said = [_said_in_words(layout, by, those, stages) for (layout, by), those in by_way.items()]
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
    sent, held = _bytes(total.sent_bytes), _whole_mib(total.memory_bytes)
    peak = f", {_whole_mib(total.memory_bytes + total.peak_bytes)} at most" if total.peak_bytes else ""
    return f"Expected: {seconds}{against}; a worker sends {sent} in it and holds {held} between steps{peak}."


def _said_in_words(layout: str, by: str, groups: Sequence[Group], stages: int) -> str:
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


def _whole_mib(count: float) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


KB = 1000
MIB = 1 << 20

LEGEND = (
    "sent: mean over workers, 1 kB = 1000 B; memory: weight, gradient and optimizer state on the fullest worker, of "
    "compute what the fullest moment of a step adds, 1 MiB = 1048576 B; time: nothing hidden behind compute"
)


class _Column(NamedTuple):
    """A column of a table: its cells, those of the line of totals, and the cell that says nothing."""

    head: str
    cell: Callable[[Any], str]
    total: str = ""
    default: str | None = None
    is_text: bool = True


def plan_page(
    words: str,
    title: str,
    groups: Sequence[Group],
    stages: Sequence[StagePlan],
    total: Forecast,
    step_seconds: float | None,
    notes: Sequence[str],
) -> Page:
    """
    Args:
        words: what stands first. total: of the step, compute included. step_seconds: against a clock, 0 if nobody
            played it, None if compute is not known yet.
    """
    why = [*_why([(group.name, group.reason) for group in groups]), *_why(_of_stages(stages))]
    below = [*_exactness(groups, notes), LEGEND + _beside(total.seconds, step_seconds or 0.0), title]
    tables = [_groups(groups, total, step_seconds is not None), *([_stages(stages)] if stages else [])]
    last = [*why, *(f"note: {note}" for note in notes)]
    return (words, *tables, "\n".join(below), *(["\n".join(last)] if last else []))


def _beside(sum_seconds: float, step_seconds: float) -> str:
    """What a step against a clock takes more or less than what stands in the table."""
    if not step_seconds or _ms(abs(sum_seconds - step_seconds)) == _ms(0.0):
        return ""
    if step_seconds < sum_seconds:
        return f"; the expected step takes {_ms(sum_seconds - step_seconds)} ms less than the sum, which are hidden"
    more = f"; the expected step takes {_ms(step_seconds - sum_seconds)} ms more than the sum"
    return f"{more}, as requests slow compute down and ranks wait for one another"


def _why(reasons: Sequence[tuple[str, str]]) -> list[str]:
    """A line for every reason there is."""
    of: dict[str, list[str]] = {}
    for name, reason in reasons:
        if reason:
            of.setdefault(reason, []).append(name)
    return [f"why {', '.join(names)}: {reason}" for reason, names in of.items()]


def _of_stages(stages: Sequence[StagePlan]) -> list[tuple[str, str]]:
    return [(f"stage {number}", stage.reason) for number, stage in enumerate(stages)]


def _groups(groups: Sequence[Group], total: Forecast, is_timed: bool) -> Table:
    count = sum(len(group.parameters) for group in groups)
    compute = total.seconds - sum(group.forecast.seconds for group in groups)
    whole, step = _mib(total.memory_bytes + total.peak_bytes), _ms(total.seconds) if is_timed else UNKNOWN
    columns = [
        _Column("group", lambda group: group.name, "step"),
        _Column("parameters", _members, str(count)),
        _Column("stage", lambda group: str(group.stage), "", "0", False),
        _Column("layout", lambda group: group.layout),
        _Column("exchange", lambda group: "schedule" if group.exchange is None else str(group.exchange)),
        _Column("cadence", lambda group: group.cadence, "", "step"),
        _Column("departures", lambda group: ", ".join(group.departures).upper() or "exact", "", "exact"),
        _Column("sent kB/step", lambda group: _kb(group.forecast.sent_bytes), _kb(total.sent_bytes), None, False),
        _Column("memory MiB", lambda group: _mib(group.forecast.memory_bytes), whole, None, False),
        _Column("time ms", lambda group: _ms(group.forecast.seconds), step, None, False),
    ]
    kept = _kept(columns, groups)
    shown = {"group": "compute", "time ms": _ms(compute) if is_timed else UNKNOWN}
    shown |= {"memory MiB": _mib(total.peak_bytes)} if total.peak_bytes else {}
    between = tuple(shown.get(column.head, "") for column in kept)
    return _table(kept, groups, [between, tuple(column.total for column in kept)])


def _stages(stages: Sequence[StagePlan]) -> Table:
    numbers = {id(stage): str(number) for number, stage in enumerate(stages)}
    columns = [
        _Column("stage", lambda stage: numbers[id(stage)]),
        _Column("begins", lambda stage: stage.begins or "the model"),
        _Column("residency", lambda stage: str(stage.residency), "", "keep"),
        _Column("objective", lambda stage: str(stage.objective), "", "whole_model"),
        _Column("edge", lambda stage: _said(stage.edge), "", ""),
        _Column("edge back", lambda stage: _said(stage.edge_back), "", ""),
        _Column("split", lambda stage: str(stage.split), "", "whole"),
        _Column("activations MiB", lambda stage: _mib(stage.forecast.peak_bytes), "", None, False),
        _Column("moved kB/step", lambda stage: _kb(stage.forecast.moved_bytes), "", "0.0", False),
        _Column("compute ms", lambda stage: _ms(stage.forecast.seconds), "", None, False),
    ]
    return _table(_kept(columns, stages), stages, [])


def _said(choice: object) -> str:
    return "" if choice is None else str(choice)


def _kept(columns: Sequence[_Column], rows: Sequence[Any]) -> list[_Column]:
    """Those in which some row says something."""
    return [one for one in columns if one.default is None or any(one.cell(row) != one.default for row in rows)]


def _table(columns: Sequence[_Column], rows: Sequence[Any], foot: Sequence[tuple[str, ...]]) -> Table:
    body = [tuple(column.cell(row) for column in columns) for row in rows]
    left = tuple(place for place, column in enumerate(columns) if column.is_text)
    return Table(tuple(column.head for column in columns), [*body, *foot], left)


def _members(group: Group) -> str:
    """How many parameters, with the first and last to arrive; a table goes by the name of its group."""
    if group.parameters == (group.name,):
        return "1"
    first, last = group.parameters[0], group.parameters[-1]
    return f"1: {first}" if len(group.parameters) == 1 else f"{len(group.parameters)}: {first} .. {last}"


def _kb(count: float) -> str:
    return f"{count / KB:,.1f}"


def _mib(count: float) -> str:
    return f"{count / MIB:,.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _exactness(groups: Sequence[Group], notes: Sequence[str]) -> list[str]:
    """One line for what is exact and one per departure that occurs: which groups, and what it means. Where forwards
    write into parameters, what is exact is the exchange alone."""
    is_rewritten = any(note.startswith(REWRITTEN) for note in notes)
    exact = "its exchange; what forwards write is NOT exact, see the note" if is_rewritten else EXACT
    meanings = {"exact": exact, **DEPARTURES}
    said = []
    for word, meaning in meanings.items():
        names = [group.name for group in groups if word in (group.departures or ("exact",))]
        if names:
            whose = "all groups" if len(names) == len(groups) else ", ".join(names)
            said.append(f"{word} ({meaning}): {whose}")
    return said
