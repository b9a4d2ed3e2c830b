"""From what was seen in batches to the rows a table moves in one step.

The profile knows alpha for one worker, for a node and for all workers it was taken with. Other numbers of workers, and
the rows of single look-ups, follow by Heaps' law: distinct rows grow as a power of the rows asked for.

Source: Heaps, Information Retrieval (1978), for the power law; a table's exponent is its own, from its row facts.
"""

import math

from armillary.exchanges.exchange import RowTraffic
from armillary.facts.parameter import RowFacts
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology

__all__ = ["busiest_share", "merged_rows", "staying_share", "traffic", "traffic_merged"]


def merged_rows(facts: RowFacts, profile: Profile, workers: int) -> float:
    """Distinct rows that `workers` workers read together in one step; as measured where it was, else by Heaps' law."""
    measured = {
        profile.workers: facts.alpha_union,
        profile.workers_per_node: facts.alpha_node,
        1: facts.alpha_worker,
    }
    if workers in measured:
        return measured[workers] * facts.rows
    one = facts.alpha_worker * facts.rows
    if profile.workers > 1 and one > 0:
        exponent = math.log(facts.alpha_union / facts.alpha_worker) / math.log(profile.workers)
    else:
        exponent = _exponent_inside(facts)
    return min(float(facts.rows), one * math.pow(workers, exponent))


def _exponent_inside(facts: RowFacts) -> float:
    """Heaps' exponent inside one batch: `ids` asked for are `distinct` rows."""
    distinct = facts.alpha_worker * facts.rows
    return math.log(distinct) / math.log(facts.ids) if facts.ids > 1 and distinct > 1 else 1.0


def traffic_merged(facts: RowFacts, profile: Profile, topology: Topology) -> RowTraffic:
    """As if a step made one look-up: for exchanges that merge a step's look-ups before they send.

    `away` is (N - 1) / N for any number of owners: over all workers, the shares they own themselves add up to 1.
    """
    return RowTraffic(
        distinct_rows=merged_rows(facts, profile, 1),
        node_rows=merged_rows(facts, profile, topology.workers_per_node),
        row_bytes=facts.row_bytes,
        lookups=1,
        away=(topology.workers - 1) / topology.workers,
    )


def traffic(facts: RowFacts, profile: Profile, topology: Topology) -> RowTraffic:
    """Distinct rows per look-up, added up over the look-ups of a step.

    Taken one by one, a row read by several look-ups counts several times. Where the profile has not told them apart,
    with L look-ups alike in size, Heaps' law gives L ** (1 - exponent) times the merged rows: between 1 (the law of new
    rows for every id) and L (all read the same rows), and never more than ids. Exact for one look-up.
    """
    merged = traffic_merged(facts, profile, topology)
    lookups = max(1, math.ceil(facts.lookups))
    repeats = _repeats(facts)
    return merged._replace(
        distinct_rows=merged.distinct_rows * repeats, node_rows=merged.node_rows * repeats, lookups=lookups
    )


def _repeats(facts: RowFacts) -> float:
    """How many look-ups of a step read a row, in the mean over the rows that one reads."""
    distinct = facts.alpha_worker * facts.rows
    if distinct <= 0:
        return 1.0
    if facts.asked_rows is not None:
        return facts.asked_rows / distinct
    by_law: float = max(1.0, facts.lookups) ** (1 - min(1.0, _exponent_inside(facts)))
    return min(by_law, max(1.0, facts.ids / distinct))


def busiest_share(facts: RowFacts, owners: int, order: str) -> float:
    """Share of all rows sent that the busiest of `owners` owners gets, rows dealt out in that order (`Ownership`).

    The profile has the loads of its own W workers; those of fewer owners follow where their number divides W. Otherwise
    even shares are assumed.
    """
    load = facts.load_hashed if order == "hashed" else facts.load_modulo
    together, left = divmod(len(load), owners)
    if left:
        return 1 / owners
    if order == "hashed":  # blocks of scattered ids: neighbouring blocks join
        return max(sum(load[first : first + together]) for first in range(0, len(load), together))
    return max(sum(load[first::owners]) for first in range(owners))


def staying_share(facts: RowFacts, profile: Profile, workers: int) -> float:
    """Share of the rows of a worker's batch that no worker read in the step before, so that it does not move them.

    As measured where it was. Else consecutive batches are taken to repeat one another as batches of
    different workers do: what stays are the new rows that one more worker would bring.
    """
    own = merged_rows(facts, profile, 1)
    if own <= 0:
        return 0.0
    if workers == profile.workers and facts.repeated is not None:
        return 1 - facts.repeated
    return _new_rows(facts, profile, workers) / own


def _new_rows(facts: RowFacts, profile: Profile, workers: int) -> float:
    """Rows that one more worker would bring."""
    more = merged_rows(facts, profile, workers + 1) - merged_rows(facts, profile, workers)
    return min(merged_rows(facts, profile, 1), max(0.0, more))
