"""The cheapest choice for every parameter, taken together.

Parameters are independent but for one thing: if any table is row-sharded, every step ends its look-ups with one more
round. So the best is either every parameter's own best, or the best with no table row-sharded.

Seconds rest on what was measured, and two measurements of one machine differ by a tenth. So a table goes by its owners
where that is up to a tenth dearer, since it then holds less: else every fresh start tosses a coin for the memory.
"""

from collections.abc import Iterable, Sequence

from armillary.facts.topology import Topology
from armillary.planning.candidates import Candidate
from armillary.planning.fitting import Menu
from armillary.planning.pricing import idle_round

__all__ = ["NOISE", "cheapest", "total_seconds"]

NOISE = 0.1  # of seconds: less is no difference


def total_seconds(chosen: Iterable[Candidate], topology: Topology) -> float:
    """What all exchanges of a step cost together."""
    chosen = list(chosen)
    rounds = idle_round(topology, sum(one.is_row_sharded for one in chosen))
    return sum(one.forecast.seconds for one in chosen) + rounds.seconds


def cheapest(options: Menu, topology: Topology) -> dict[str, Candidate]:
    """Fewest seconds, or about as few and less memory; among equals the one that is listed first."""
    own_best = {name: _best(ways) for name, ways in options.items()}
    without = {
        name: _fastest([way for way in ways if not way.is_row_sharded] or ways) for name, ways in options.items()
    }
    apart = [name for name in options if own_best[name] != without[name]]
    at_stake = total_seconds((without[name] for name in apart), topology)
    lost = total_seconds(own_best.values(), topology) - total_seconds(without.values(), topology)
    held, whole = (sum(one[name].forecast.memory_bytes for name in apart) for one in (own_best, without))
    return own_best if lost <= (NOISE * at_stake if held < whole else 0.0) else without


def _best(ways: Sequence[Candidate]) -> Candidate:
    """The fastest; or by owners, if that holds less than the fastest and takes about as long."""
    fastest = _fastest(ways)
    limit = (1 + NOISE) * fastest.forecast.seconds
    spread = [way for way in ways if way.is_row_sharded and way.forecast.memory_bytes < fastest.forecast.memory_bytes]
    return _fastest([way for way in spread if way.forecast.seconds <= limit] or [fastest])


def _fastest(ways: Iterable[Candidate]) -> Candidate:
    return min(ways, key=lambda way: way.forecast.seconds)
