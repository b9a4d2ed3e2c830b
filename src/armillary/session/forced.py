"""Plans that nobody chose by price: every parameter by one given exchange, wherever that exchange can carry it.

`verify` holds each exchange against one process with them, and they are what a priced plan is compared with.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from armillary.exchanges.exchange import build_row, dense_exchanges, row_exchanges
from armillary.facts.group import Layout
from armillary.facts.mesh import Mesh
from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Group, Plan
from armillary.facts.profile import Profile
from armillary.planning.assembly import consensus_of, dense_group
from armillary.planning.parallax import PLAIN

__all__ = ["forced"]


def forced(profile: Profile, exchange: Choice, workers_per_node: int = 1) -> Plan:
    """Every trained parameter by `exchange`; by all_reduce where a row exchange meets one that is not read by row.

    Raises:
        ValueError: no such exchange; the message lists those that exist.
    """
    trained = [fact for fact in profile.parameters if fact.requires_grad]
    known = {**dense_exchanges(), **row_exchanges()}
    if exchange.name not in known:
        raise ValueError(f"plan: no exchange {exchange.name!r}; there are {', '.join(sorted(known))}")
    by_row = [fact for fact in trained if fact.shardable] if exchange.name in row_exchanges() else []
    rest = [fact for fact in trained if fact not in by_row]
    dense = exchange if exchange.name in dense_exchanges() else PLAIN["replicated"]
    groups = [_table(fact, exchange) for fact in by_row]
    for dtype, members in _by_dtype(rest).items():
        names = tuple(fact.name for fact in members)
        groups.append(dense_group(f"dense {dtype}", names, dense, reason="asked for"))
    arrival = {fact.name: math.inf if fact.arrival is None else fact.arrival for fact in trained}
    groups.sort(key=lambda group: max(arrival[name] for name in group.parameters))
    return Plan(
        Mesh.of(data=profile.workers),
        tuple(groups),
        profile.model_fingerprint,
        workers_per_node=workers_per_node,
        consensus=consensus_of(groups),
    )


def _table(fact: ParameterFact, exchange: Choice) -> Group:
    layout: Layout = "replicated"
    built = build_row(exchange.name, **exchange.options)
    if built.placement == "row_sharded":
        layout = "row_sharded"
    return Group(fact.name, (fact.name,), layout, exchange, departures=built.codes.departs, reason="asked for")


def _by_dtype(facts: Iterable[ParameterFact]) -> dict[str, list[ParameterFact]]:
    """A bucket holds one dtype."""
    found: dict[str, list[ParameterFact]] = defaultdict(list)
    for fact in facts:
        found[fact.dtype].append(fact)
    return found
