"""Adds look-ahead to a plan: which of its tables are foreseen, what of them may go early, and what that sends.

Rows may go before a step only where it is provable that they stay put: the optimizer leaves rows without gradient
alone, or the table is lazy. Otherwise ids and counts go early, and rows right after the step. Both are exact.
"""

from dataclasses import replace

from armillary.exchanges.exchange import row_exchanges
from armillary.exchanges.look_up import FORESEEN, HEADER_BYTES, outlook_bytes
from armillary.facts.plan import Forecast, Group, LookAhead, Plan
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.pricing import ADAM, Assumptions, Case
from armillary.planning.traffic import traffic

__all__ = ["looking_ahead"]

MASK_BYTES = 1  # per row asked for: whether it stays put
NOTE = "bytes are forecast for a loop over run.batches in which every look-up of tables that look ahead is foreseen"


def looking_ahead(plan: Plan, profile: Profile, topology: Topology, assumptions: Assumptions = ADAM) -> Plan:
    """The same plan for loops over `run.batches`, with every table by `owned_rows` foreseen.

    Bytes are forecast as if every look-up were foreseen; one that is not sends a header more. Seconds stay as they
    are: nothing is hidden in them, with look-ahead or without.

    Args:
        profile, topology, assumptions: what the plan was made from.
    """
    case = Case(profile, topology, assumptions)
    names = [group.name for group in plan.groups if _can_be_early(group)][:FORESEEN]
    groups = [_foreseen(group, case) if group.name in names else group for group in plan.groups]
    if not names:
        return plan
    # The round in which the loop gets its batch, and what every rank says of the batches to come.
    once = Forecast(sent_bytes=float((topology.workers - 1) * (HEADER_BYTES + outlook_bytes(len(names)))))
    first = next(place for place, group in enumerate(groups) if group.name in names)
    groups[first] = replace(groups[first], forecast=groups[first].forecast + once)
    return replace(plan, groups=tuple(groups), notes=(*plan.notes, NOTE))


def _can_be_early(group: Group) -> bool:
    entry = row_exchanges().get(group.exchange.name)
    return entry is not None and entry.make(**group.exchange.options).pull_early is not None


def _foreseen(group: Group, case: Case) -> Group:
    kind: LookAhead = "rows" if group.update == "lazy" or not case.assumptions.moves_quiet_rows else "ids"
    rows = next(fact.rows for fact in case.profile.parameters if fact.name == group.parameters[0])
    assert rows is not None, group
    moved = traffic(rows, case.profile, case.topology)
    masks = moved.distinct_rows * moved.away * MASK_BYTES if kind == "rows" else 0.0
    headers = moved.lookups * HEADER_BYTES * (case.topology.workers - 1)
    return replace(group, look_ahead=kind, forecast=group.forecast + Forecast(sent_bytes=masks - headers))
