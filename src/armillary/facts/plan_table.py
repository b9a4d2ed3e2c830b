"""A plan on paper: one line a group in launch order, compute and totals, what is exact and what is not, and the notes.

Plain text, so that facts needs no library; one unit a column, so that numbers can be compared down the page.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from armillary.facts.profile_table import aligned

__all__ = ["Line", "plan_table"]

HEADER = (
    *("group", "parameters", "placement", "exchange", "update"),
    *("sent kB/step", "memory MiB", "time ms", "reason"),
)
LEFT = (0, 1, 2, 3, 4, 8)
KB = 1000
MIB = 1 << 20

LEGEND = (
    "sent: mean over workers, 1 kB = 1000 B; memory: weight, gradient and optimizer state on the fullest worker, "
    "1 MiB = 1048576 B; time: nothing hidden behind compute"
)


class Line(NamedTuple):
    """One line of the table. parameters: names in launch order."""

    name: str
    parameters: tuple[str, ...]
    placement: str
    exchange: str
    update: str
    sent_bytes: float
    memory_bytes: float
    seconds: float
    reason: str


def plan_table(
    title: str, lines: Sequence[Line], compute_seconds: float, meanings: Mapping[str, str], notes: Sequence[str]
) -> str:
    """
    Args:
        meanings: every kind of update there is and what it means, "exact" among them.
    """
    compute = ("compute", "", "", "", "", "", "", _ms(compute_seconds), "forward and backward")
    count = sum(len(line.parameters) for line in lines)
    sent, held = sum(line.sent_bytes for line in lines), sum(line.memory_bytes for line in lines)
    seconds = compute_seconds + sum(line.seconds for line in lines)
    total = ("step", str(count), "", "", "", _kb(sent), _mib(held), _ms(seconds), "")
    body = aligned(HEADER, [*map(_cells, lines), compute, total], left=LEFT)
    sections = [title, body, "\n".join([*_exactness(lines, meanings), LEGEND])]
    if notes:
        sections.append("\n".join(f"note: {note}" for note in notes))
    return "\n\n".join(sections)


def _cells(line: Line) -> tuple[str, ...]:
    figures = (_kb(line.sent_bytes), _mib(line.memory_bytes), _ms(line.seconds))
    update = line.update if line.update == "exact" else line.update.upper()
    return line.name, _members(line), line.placement, line.exchange, update, *figures, line.reason


def _members(line: Line) -> str:
    """How many parameters, with the first and last to arrive; a table goes by the name of its group."""
    if line.parameters == (line.name,):
        return "1"
    first, last = line.parameters[0], line.parameters[-1]
    return f"1: {first}" if len(line.parameters) == 1 else f"{len(line.parameters)}: {first} .. {last}"


def _kb(count: float) -> str:
    return f"{count / KB:,.1f}"


def _mib(count: float) -> str:
    return f"{count / MIB:,.1f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _exactness(lines: Sequence[Line], meanings: Mapping[str, str]) -> list[str]:
    """One line per kind of update that occurs: which groups, and what it means."""
    said = []
    for update, meaning in meanings.items():
        names = [line.name for line in lines if line.update == update]
        if names:
            whose = "all groups" if len(names) == len(lines) else ", ".join(names)
            said.append(f"{update} ({meaning}): {whose}")
    return said
