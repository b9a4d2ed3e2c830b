"""Which edge of a schedule a message is of, and which group of the plan is charged with it.

A plan charges the first group of a stage with all that the stage passes on (`planning/staged_plan`). So bytes of an
edge are a part of that group's, and are shown apart.
"""

import re
from typing import get_args

from armillary.facts.plan import Group, Plan
from armillary.planning.stage_groups import charged_to
from armillary.runtime.mailbox import LENGTHS
from armillary.schedules.instruction import What
from armillary.session.tally import OTHER

__all__ = ["EdgeLabels", "way_of"]

UNPLANNED = "buffers"  # no forecast has them
_WHAT = "|".join(what for what in get_args(What) if what != UNPLANNED)
_EDGE = re.compile(rf"(?:{LENGTHS})?(?P<edge>(?:{_WHAT}) of stage (?P<stage>\d+))")


def way_of(plan: Plan, group: Group) -> str:
    """How a group travels, in words of the plan: by its exchange, or by the schedule's own messages."""
    return plan.schedule.name if group.exchange is None else str(group.exchange)


class EdgeLabels:
    """Of a plan's schedule; `Letter.edge` is the name of one."""

    def __init__(self, plan: Plan) -> None:
        first = {group.stage: group.name for group in reversed(plan.groups)}
        holding = sorted(first)
        self._charged = {stage: first[charged_to(stage, holding)] for stage in range(len(plan.stages) or 1) if holding}
        self._groups = {group.name for group in plan.groups}

    def edge_of(self, label: str) -> str | None:
        """None: of no edge. Forms, which the first letter of an edge brings along, are of none."""
        found = _EDGE.fullmatch(label)
        return found["edge"] if found else None

    @staticmethod
    def order(edge: str) -> tuple[int, str]:
        """Edges by the stage that made what crosses, whenever it does."""
        found = _EDGE.fullmatch(edge)
        return (int(found["stage"]), edge) if found else (0, edge)

    def group_of(self, label: str) -> str:
        """Of a request or message under that label."""
        if found := _EDGE.fullmatch(label):
            return self._charged[int(found["stage"])]
        return label if label in self._groups else OTHER
