"""The page of the cells: a table each, and what they are held to."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.measuring.bars import Bar, table
from benchmarks.measuring.record import machines

__all__ = ["Found", "bars_of", "lines_of"]

Found = Mapping[str, Any]
MIB = 1 << 20
UNIFORM = ("keep all", "recompute every stage", "swap every stage")
CACHED = "tutorial's hooks through the page cache"  # not held to the tier's rate, so no rival


def lines_of(found: Mapping[str, Found]) -> list[str]:
    lines = [
        f"Budget: weights, gradients and 0.45 of the activations. {machines(one['machine'] for one in found.values())}"
    ]
    cells = {name: one for name, one in found.items() if "seconds" in one}
    for name, one in cells.items():
        lines += ["", f"## {name} of the activations a forward second", "", *_cell(one)]
    if cells:
        lines += ["", "## Ablation: one choice for all stages", "", *_ablation(cells)]
    for name, one in found.items():
        if name.startswith("budgets"):
            lines += ["", f"## {name.removeprefix('budgets ')}: ten falling budgets", "", *_budgets(one)]
    if "two ranks" in found:
        lines += ["", "## Two ranks, Adam", "", *_ranks(found["two ranks"])]
    if "planner" in found:
        lines += ["", "## The planner alone", "", *_planner(found["planner"])]
    return [*lines, "", "## Bars", "", *table(bars_of(found))]


def bars_of(found: Mapping[str, Found]) -> list[Bar]:
    cells = [one for one in found.values() if "seconds" in one]
    ladders = [one["rows"] for name, one in found.items() if name.startswith("budgets") and name.endswith("ours")]
    return [*_bars(cells), *_ladder_bars(ladders), *_planner_bars(found.get("planner"))]


def _rows(head: str, rows: Sequence[Sequence[str]]) -> list[str]:
    cells = head.split(" | ")
    return [f"| {head} |", "|" + " --- |" * len(cells), *[f"| {' | '.join(row)} |" for row in rows]]


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.0f}"


def _median(one: Found, way: str) -> float:
    return statistics.median(one["seconds"][way])


def _counts(residencies: Sequence[str]) -> str:
    counts = {word: list(residencies).count(word) for word in ("keep", "recompute", "swap")}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def _cell(one: Found) -> list[str]:
    keep = _median(one, "keep all")
    moved, spared = one["moved"][-1]
    rows = []
    for way, seconds in one["seconds"].items():
        spread = f"{min(seconds) / keep:.2f} to {max(seconds) / keep:.2f}"
        fits = "yes" if one["peaks"][way] <= one["budget"] else "no"
        rows.append(
            [way, f"{_median(one, way) / keep:.2f}", spread, _mib(one["peaks"][way]), _mib(one["kernel"][way]), fits]
        )
    return [
        f"Plan: {_counts(one['residencies'])}, {one['slots']} slots. Budget {_mib(one['budget'])} MiB. "
        f"A pass that keeps all takes {keep:.2f} s.",
        "",
        *_rows("way | times keeping all | range | peak MiB | kernel's peak MiB | fits", rows),
        "",
        *_rows(
            "planned | forecast | measured",
            [
                ["times keeping all", f"{_forecast_times(one):.2f}", f"{_median(one, 'planned') / keep:.2f}"],
                ["seconds", f"{one['forecast_seconds']:.2f}", f"{_median(one, 'planned'):.2f}"],
                ["peak MiB", _mib(one["forecast_peak"]), _mib(one["peaks"]["planned"])],
                ["moved MiB", _mib(one["forecast_moved"]), f"{_mib(moved)}, and {_mib(spared)} spared"],
            ],
        ),
        "",
        f"Files in the page cache: {_mib(one['cached'])} MiB at the most, which no peak counts.",
    ]


def _forecast_times(one: Found) -> float:
    times: float = one["forecast_seconds"] / one["forecast_keep_seconds"]
    return times


def _ablation(cells: Mapping[str, Found]) -> list[str]:
    rows = []
    for name, one in cells.items():
        fits = [way for way in UNIFORM if one["peaks"][way] <= one["budget"]]
        best = min(fits, key=lambda way: _median(one, way), default="none fits")
        times = f"{_median(one, best) / _median(one, 'planned'):.2f}" if fits else ""
        rows.append([name, best, times])
    return _rows("cell | the best that fits | its seconds, times those of the plan", rows)


def _budgets(one: Found) -> list[str]:
    if one["skipped"]:
        return [f"Skipped: {one['skipped']}"]
    rows = one["rows"]
    if "forecast" in rows[0]:
        head = "budget MiB | forecast of the peak MiB | peak MiB | rise | plan"
    else:
        head = "activation_memory_budget | peak MiB | rise"
    lines = []
    before: float | None = None
    for row in rows:
        rise = "" if before is None else f"{row['peak'] / before - 1:+.1%}"
        if "forecast" in row:
            cells = [_mib(row["budget"]), _mib(row["forecast"]), _mib(row["peak"]), rise, _counts(row["residencies"])]
        elif "counted" in row:
            lines.append(["not compiled", f"{_mib(row['peak'])}, by operation {_mib(row['counted'])}", ""])
            continue
        else:
            cells = [f"{row['budget']:.1f}", _mib(row["peak"]), rise]
        lines.append(cells)
        before = row["peak"]
    told = [] if "forecast" in rows[0] else [f"Backend: {one['backend']}.", ""]
    return [*told, *_rows(head, lines)]


def _ranks(one: Found) -> list[str]:
    rows = []
    for way, told in one["ways"].items():
        seconds = told["seconds"]
        rows.append(
            [
                way,
                f"{statistics.median(seconds):.2f}",
                f"{min(seconds):.2f} to {max(seconds):.2f}",
                _mib(told["peak"]),
                _mib(told["bytes"]),
                _counts(told.get("residencies", ())),
            ]
        )
    return [
        f"Budget: the checkpoint's peak, {_mib(one['budget'])} MiB a rank.",
        "",
        *_rows("way | seconds a step | range | peak MiB | disk MiB a step and rank | plan", rows),
    ]


def _planner(one: Found) -> list[str]:
    beside = [two for two in one["beside"] if two]
    rows = []
    for kind in dict.fromkeys(long["stages"] for long in one["long"]):
        those = [long for long in one["long"] if long["stages"] == kind]
        rows.append(
            [
                kind,
                str(len(those)),
                f"{max(long['took'] for long in those):.1f}",
                f"{max(long['told'] for long in those):.4f}",
                f"{max(long['above'] for long in those):.4f}",
            ]
        )
    worst = max((plan / best for plan, best in beside), default=0.0)
    equal = sum(plan <= best * (1 + 1e-6) for plan, best in beside)
    return [
        f"{len(one['beside'])} chains of seven, beside every choice: {len(beside)} have one that fits. "
        f"The plan takes at most {worst:.4f} times the best, and {equal} plans are the best.",
        "",
        *_rows("32 stages | chains | seconds, most | gap told, most | above the bound, most", rows),
    ]


def _best_that_fits(one: Found, ways: Sequence[str]) -> float | None:
    fits = [_median(one, way) for way in ways if one["peaks"][way] <= one["budget"]]
    return min(fits, default=None)


def _of(figures: Sequence[float], one: Callable[[Sequence[float]], float]) -> list[float]:
    return [one(figures)] if figures else []


def _bars(those: Sequence[Found]) -> list[Bar]:
    rivals = [_best_that_fits(one, [w for w in one["seconds"] if w not in ("planned", CACHED)]) for one in those]
    planned = [_median(one, "planned") for one in those]
    best = [rival / ours for rival, ours in zip(rivals, planned, strict=True) if rival]
    hooks = [_median(one, "tutorial's hooks") / ours for one, ours in zip(those, planned, strict=True)]
    peaks = [one["peaks"]["planned"] / one["budget"] for one in those]
    forecasts = [abs(one["forecast_peak"] / one["peaks"]["planned"] - 1) for one in those]
    seconds = [abs(one["forecast_seconds"] / ours - 1) for one, ours in zip(those, planned, strict=True)]
    moved = [abs(sum(two) - one["forecast_moved"]) for one in those for two in one["moved"]]
    return [
        Bar("speed beside the best other way that fits, least", ">= 0.95", _of(best, min), lambda one: one >= 0.95),
        Bar("speed beside the tutorial's hooks, mean", ">= 1.3", _of(hooks, statistics.mean), lambda one: one >= 1.3),
        Bar("peak of the budget, most", "<= 1", _of(peaks, max), lambda one: one <= 1),
        Bar("peak beside its forecast, most, share", "<= 0.02", _of(forecasts, max), lambda one: one <= 0.02, 3),
        Bar("seconds beside their forecast, median, share", "<= 0.15", _of(seconds, statistics.median), _within),
        Bar("moved and spared beside the forecast, most, bytes", "0", _of(moved, max), lambda one: one == 0, 0),
    ]


def _within(one: float) -> bool:
    return one <= 0.15


def _ladder_bars(ladders: Sequence[Sequence[Mapping[str, float]]]) -> list[Bar]:
    pairs = [two for rows in ladders for two in pairwise(rows)]
    rises = [after["peak"] / before["peak"] - 1 for before, after in pairs]
    over = [row["peak"] / row["budget"] for rows in ladders for row in rows]
    return [
        Bar("peak over ten falling budgets, most rise, share", "<= 0", _of(rises, max), lambda one: one <= 0, 4),
        Bar("peak of those budgets, most", "<= 1", _of(over, max), lambda one: one <= 1),
    ]


def _planner_bars(one: Found | None) -> list[Bar]:
    beside = [plan / best for plan, best in filter(None, one["beside"])] if one else []
    told = [long["told"] for long in one["long"]] if one else []
    above = [long["above"] for long in one["long"]] if one else []
    took = [long["took"] for long in one["long"]] if one else []
    return [
        Bar(
            "plan beside exhaustive search, 50 chains, most", "<= 1.01", _of(beside, max), lambda x: x <= 1.01 + 1e-6, 4
        ),
        Bar("32 stages: gap told, most", "<= 0.01", _of(told, max), lambda one: one <= 0.01, 4),
        Bar("32 stages: above the bound, 1 % of it given for memory, most", "<= 0.0201", _of(above, max), _proven, 4),
        Bar("32 stages: seconds, most", "<= 10", _of(took, max), lambda one: one <= 10, 1),
    ]


def _proven(one: float) -> bool:
    """A gap of 1 %, beside the 1 % by which a plan may be slower where its peak is smaller."""
    return one <= 1.01 * 1.01 - 1
