"""The cheapest choice for every parameter, taken together.

Parameters are independent but for one thing: if any table is row-sharded, every step ends its look-ups with one more
round. So the best is either every parameter's own best, or the best with no table row-sharded.
"""

from collections.abc import Iterable

from armillary.facts.topology import Topology
from armillary.planning.candidates import Candidate
from armillary.planning.fitting import Menu
from armillary.planning.pricing import idle_round

__all__ = ["cheapest", "total_seconds"]


def total_seconds(chosen: Iterable[Candidate], topology: Topology) -> float:
    """What all exchanges of a step cost together."""
    chosen = list(chosen)
    rounds = idle_round(topology, sum(one.is_row_sharded for one in chosen))
    return sum(one.forecast.seconds for one in chosen) + rounds.seconds


def cheapest(options: Menu, topology: Topology) -> dict[str, Candidate]:
    """Fewest seconds; among equals the one that is listed first."""
    own_best = {name: _fastest(ways) for name, ways in options.items()}
    without = {
        name: _fastest([way for way in ways if not way.is_row_sharded] or ways) for name, ways in options.items()
    }
    return min(own_best, without, key=lambda chosen: total_seconds(chosen.values(), topology))


def _fastest(ways: Iterable[Candidate]) -> Candidate:
    return min(ways, key=lambda way: way.forecast.seconds)
