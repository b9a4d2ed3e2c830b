"""The cheapest choice for every parameter, taken together.

Parameters are independent but for one thing: if any table is row-sharded, every step ends its look-ups with one more
round. So the best is either every parameter's own best, or the best with no table row-sharded.

Seconds rest on what was measured, and two measurements of one machine differ. What lies inside their scatter is no
difference: there the way that holds less is taken, else every fresh start tosses a coin for the memory.
"""

from collections.abc import Iterable, Sequence

from armillary.facts.topology import Topology
from armillary.planning.candidates import Candidate
from armillary.planning.fitting import Menu
from armillary.planning.pricing import idle_round

__all__ = ["NOISE", "cheapest", "margin", "total_seconds"]

NOISE = 0.1  # of seconds: less is no difference, however well they were measured


def margin(topology: Topology) -> float:
    """The share by which two prices must differ on these machines to be told apart."""
    return NOISE + topology.scatter


def total_seconds(chosen: Iterable[Candidate], topology: Topology) -> float:
    """What all exchanges of a step cost together."""
    chosen = list(chosen)
    rounds = idle_round(topology, sum(one.is_row_sharded for one in chosen))
    return sum(one.forecast.seconds for one in chosen) + rounds.seconds


def cheapest(options: Menu, topology: Topology) -> dict[str, Candidate]:
    """Fewest seconds, or about as few and less memory; among equals the one that is listed first."""
    close = margin(topology)
    own_best = {name: _best(ways, close) for name, ways in options.items()}
    without = {
        name: _least([way for way in ways if not way.is_row_sharded] or ways, topology.scatter)
        for name, ways in options.items()
    }
    apart = [name for name in options if own_best[name] != without[name]]
    at_stake = total_seconds((without[name] for name in apart), topology)
    lost = total_seconds(own_best.values(), topology) - total_seconds(without.values(), topology)
    held, whole = (sum(one[name].forecast.memory_bytes for name in apart) for one in (own_best, without))
    return own_best if lost <= (close * at_stake if held < whole else 0.0) else without


def _best(ways: Sequence[Candidate], close: float) -> Candidate:
    """The fastest; or by owners, if that holds less than the fastest and takes about as long."""
    spread, others = ([way for way in ways if way.is_row_sharded is by_owners] for by_owners in (True, False))
    fastest = _fastest(ways)
    limit = (1 + close) * fastest.forecast.seconds
    held = fastest.forecast.memory_bytes
    if less := [way for way in spread if way.forecast.memory_bytes < held and way.forecast.seconds <= limit]:
        return _fastest(less)
    return fastest if fastest.is_row_sharded else _least(others, close - NOISE)


def _least(ways: Sequence[Candidate], scatter: float) -> Candidate:
    """The one that holds least of those inside the scatter. Ways of one exchange ask for the same requests, so scatter
    leaves their order as it is."""
    names = dict.fromkeys(way.choice.name for way in ways)
    quickest = [_fastest([way for way in ways if way.choice.name == name]) for name in names]
    fastest = _fastest(quickest)
    limit = (1 + scatter) * fastest.forecast.seconds
    held = fastest.forecast.memory_bytes
    less = [way for way in quickest if way.forecast.seconds <= limit and way.forecast.memory_bytes < held]
    return min(less, key=lambda way: way.forecast.memory_bytes, default=fastest)


def _fastest(ways: Iterable[Candidate]) -> Candidate:
    return min(ways, key=lambda way: way.forecast.seconds)
