"""The page: whether starts agree, how long they take, and what their forecasts are worth."""

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import armillary
from armillary import Choice, Plan, Profile, Topology
from armillary.planning.memory import margin
from armillary.planning.pricing import assumptions_behind
from benchmarks.measuring.bars import Bar, table

__all__ = ["WAYS", "bars", "page"]

WAYS = ("DDP", "empty", "kept")
LIMITS = {"empty": 2.0, "kept": 1.3}  # times DDP's
OFF = 0.25
MIB = 1 << 20

Found = Mapping[str, Any]  # by name of a start; and the machine


def _of(found: Found, way: str) -> dict[str, list[Mapping[str, Any]]]:
    """By script, in the order of starts."""
    by_script: dict[str, list[Mapping[str, Any]]] = {}
    for name, start in found.items():
        script, _, rest = name.partition("/")
        if rest.partition("/")[0] == way:
            by_script.setdefault(script, []).append(start)
    return by_script


def _plan(start: Mapping[str, Any]) -> Plan:
    return Plan.from_json(json.dumps(start["plan"]))


def _choices(plan: Plan) -> str:
    """What of a plan must be the same: who travels together, and by what."""
    return "; ".join(f"{group.name} ({len(group.parameters)}) by {group.exchange}" for group in plan.groups)


def _differing(plans: Sequence[Plan]) -> int:
    """How many are not the commonest."""
    return len(plans) - max(Counter(map(_choices, plans)).values())


def _scatter(start: Mapping[str, Any]) -> float:
    return margin(Topology.from_json(json.dumps(start["topology"])))


def _wasteful(starts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Pairs of which the first holds more than the second, though by its own prices it gains less than its scatter."""
    plans = {_choices(plan): plan for plan in map(_plan, starts)}
    for start in starts:
        mine = _plan(start)
        for said, other in plans.items():
            if said == _choices(mine) or other.forecast.memory_bytes >= mine.forecast.memory_bytes:
                continue
            theirs = armillary.plan(
                Profile.from_json(json.dumps(start["profile"])),
                Topology.from_json(json.dumps(start["topology"])),
                constraints={
                    name: group.exchange or Choice("all_reduce") for group in other.groups for name in group.parameters
                },
                assumptions=assumptions_behind(mine),
            )
            prices = [sum(group.forecast.seconds for group in one.groups) for one in (mine, theirs)]
            if prices[1] <= (1 + _scatter(start)) * prices[0]:
                yield f"{_choices(mine)} over {said}"


def bars(found: Found) -> list[Bar]:
    empty, kept, plain = (_of(found, way) for way in ("empty", "kept", "DDP"))
    asked = list[Bar]()
    for script in kept:
        plans, again = [_plan(one) for one in empty[script]], [_plan(one) for one in kept[script]]
        figures = {
            f"of {len(plans)} plans made in empty folders, differ": _differing(plans),
            "hold more than another inside their scatter": len({*_wasteful(empty[script])}),
            f"of {len(again)} restarts from kept files, have another plan": sum(one != again[0] for one in again),
            "of these, measured anything": sum(one["measured"] > 0 for one in kept[script]),
        }
        for (said, figure), most in zip(figures.items(), (1, 0, 0, 0), strict=True):
            asked.append(_at_most(f"{script}: {said}", f"{most} or fewer", most, [figure], 0))
        for way, starts in (("empty", empty), ("kept", kept)):
            ratio = _usual(starts[script]) / _usual(plain[script])
            said = f"{script}: process start to the end of step 1, {way} folder, times DDP's"
            asked.append(_at_most(said, f"{LIMITS[way]:g} or less", LIMITS[way], [ratio]))
    for script, starts in empty.items():
        offs = [100 * abs(off) for off in _offs(starts)]
        said = f"{script}: corrected forecast off the median of 100 later steps, worst of {len(offs)} starts, per cent"
        asked.append(_at_most(said, f"{OFF:.0%} or less", 100 * OFF, [max(offs)] if offs else []))
    return asked


def _at_most(said: str, wanted: str, most: float, figures: Sequence[float], digits: int = 2) -> Bar:
    return Bar(said, wanted, figures, lambda it: it <= most, digits)


TURNS = 5


def _usual(starts: Sequence[Mapping[str, Any]]) -> float:
    """Seconds to the end of step 1."""
    return statistics.median(one["first_step_seconds"] for one in starts[:TURNS])


def _offs(starts: Sequence[Mapping[str, Any]]) -> list[float]:
    long = [one for one in starts if one["later_seconds"] is not None]
    return [one["plan"]["step_seconds"] / one["later_seconds"] - 1 for one in long]


def page(found: Found) -> str:
    parts = [
        str(found.get("machine", "")),
        "\n".join(table(bars(found))),
        _times(found),
        _plans(found),
        _forecasts(found),
    ]
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _times(found: Found) -> str:
    rows = []
    for way in WAYS:
        for script, starts in _of(found, way).items():
            taken = [one["first_step_seconds"] for one in starts[:TURNS]]
            rows.append((script, way, f"{statistics.median(taken):.1f} ({min(taken):.1f}-{max(taken):.1f})"))
    return _table(("script", "way", "s to the end of step 1: median (lowest-highest)"), sorted(rows))


def _plans(found: Found) -> str:
    rows = []
    for script, starts in _of(found, "empty").items():
        counts = Counter(_choices(_plan(one)) for one in starts)
        for said, count in counts.most_common():
            those = [one for one in starts if _choices(_plan(one)) == said]
            held = _plan(those[0]).forecast.memory_bytes / MIB
            scatter = [_scatter(one) for one in those]
            rows.append((script, str(count), said, f"{held:.1f}", f"{min(scatter):.0%} to {max(scatter):.0%}"))
    return _table(("script", "starts", "plan", "MiB held", "prices are told apart from"), rows)


def _forecasts(found: Found) -> str:
    rows = []
    for script, starts in _of(found, "empty").items():
        for one in starts:
            if one["later_seconds"] is not None:
                figures = [one["plan"]["step_seconds"], one["later_seconds"]]
                shown = [f"{1e3 * figure:.1f}" for figure in figures]
                first = one["said"][0].rpartition("was ")[2] if one["said"] else "-"
                rows.append((script, first, *shown, f"{figures[0] / figures[1] - 1:+.0%}"))
    return _table(("script", "first forecast", "corrected, ms", "100 later steps, ms", "off"), rows)
