"""Over how many owners each table is split, found by timing the exchange in this job before step 0.

Parallax relaunches the whole job for every number of partitions it tries (EuroSys 2019, partitioning); here a trial is
a look-up and a push. The model theta0 + theta1 / P + theta2 P is fitted and the choice is written into the plan, with
its log.
"""

import math
from dataclasses import replace

from armillary.exchanges.exchange import build_row, row_exchanges
from armillary.facts.plan import Choice, Group, Plan
from armillary.facts.profile import Profile
from armillary.planning.partitions import Search, search
from armillary.runtime.hybrid.row_timer import row_seconds
from armillary.runtime.transport import Transport

__all__ = ["choose_owners"]


def choose_owners(plan: Plan, profile: Profile, transport: Transport, memory_bytes: int) -> Plan:
    """The plan with the number of owners of every table whose exchange has one to choose and does not name it.

    Every rank must call it; all of them get the same plan. A table is not split over fewer owners than can hold it
    twice (weight and gradient).
    """
    notes: list[str] = []
    groups: list[Group] = []
    for group in plan.groups:
        option = (
            row_exchanges()[group.own_exchange.name].owner_option if group.own_exchange.name in row_exchanges() else ""
        )
        if not option or option in group.own_exchange.options or plan.workers == 1:
            groups.append(group)
            continue
        found = _search(group, option, profile, transport, memory_bytes)
        table = str(found).replace("\n", "\n    ")
        notes.append(f"{group.parameters[0]}: owners searched, {found.chosen} of {plan.workers} chosen\n    {table}")
        options = {**group.own_exchange.options, option: found.chosen}
        groups.append(replace(group, exchange=Choice(group.own_exchange.name, options)))
    return replace(plan, groups=tuple(groups), notes=(*plan.notes, *notes))


def _search(group: Group, option: str, profile: Profile, transport: Transport, memory_bytes: int) -> Search:
    fact = profile.parameter(group.parameters[0])
    assert fact.rows is not None, f"{fact.name} is exchanged by row but was never read by row"
    rows, row_numel = fact.shape[0], math.prod(fact.shape[1:])
    distinct = round(fact.rows.alpha_worker * rows)
    fewest = min(transport.place.workers, max(1, math.ceil(2 * fact.bytes / memory_bytes)))

    def seconds(owners: int) -> float:
        exchange = build_row(group.own_exchange.name, **{**group.own_exchange.options, option: owners})
        return row_seconds(transport, exchange, rows, row_numel, distinct)

    start = max(fewest, min(transport.place.nodes, transport.place.workers))
    return search(seconds, start, fewest, transport.place.workers)
