"""A run in one picture: loss, held-out metric and throughput against steps, each group's forecast beside measured.

It needs matplotlib.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from armillary.plans.group import Forecast
from armillary.plans.plan import Plan
from armillary.plans.units import seconds_text
from armillary.session.events import Ended
from armillary.session.report import Comparison
from armillary.session.workload import Workload, baseline_name

__all__ = ["plan_in_words", "plot"]


BLUE, ORANGE, GREY = "#2563a8", "#c2570c", "#777777"
MOST_GROUPS, LONGEST_NAME = 8, 28
JOINED_FROM = 3  # points: a line through fewer shows a curve that nobody has seen


def plot(lines: Sequence[Mapping[str, Any]], ended: Ended, workload: Workload, plan: Plan) -> Figure:
    """The figure of a run's metrics (`folder.note`); the last metric of the workload's report is the one drawn."""
    progress = [line for line in lines if line["kind"] == "progress"]
    evaluated = [line for line in lines if line["kind"] == "evaluated"]
    groups = _longest(ended.comparison)
    figure = Figure(figsize=(9, 9 + (1 + 0.45 * len(groups)) * bool(groups)), dpi=120, layout="constrained")
    figure.suptitle(f"{workload.name}, {date.today()}\n{plan_in_words(plan)}\n{_step_in_words(ended)}", fontsize=11)
    count = 3 if evaluated else 2
    heights = [3.0] * count + [1 + 0.45 * len(groups)] * bool(groups)
    every = figure.subplots(len(heights), 1, height_ratios=heights)
    panels = every[:count]
    for panel in panels[1:]:
        panel.sharex(panels[0])
    for panel in panels[:-1]:
        panel.tick_params(labelbottom=False)
    if groups:
        _draw_groups(every[count], groups)
    steps = [line["step"] for line in progress]
    style = "-" if len(steps) >= JOINED_FROM else "o"
    panels[0].plot(steps, [line["loss"] for line in progress], style, color=BLUE, linewidth=1)
    panels[0].set_ylabel("training loss\n(mean over workers)")
    if evaluated:
        _draw_metric(panels[1], evaluated, ended.baseline, baseline_name(workload))
    panels[-1].plot(steps, [line["samples_per_second"] for line in progress], style, color=BLUE, linewidth=1)
    panels[-1].set_ylabel(f"throughput\n({workload.unit} per second, all workers)")
    panels[-1].set_ylim(bottom=0)
    panels[-1].set_xlabel("optimizer steps")
    for panel in panels:
        panel.grid(alpha=0.3)
    return figure


def _longest(lines: Sequence[Comparison]) -> list[Comparison]:
    """Those that took time or were to: the longest, and the others together."""
    timed = [line for line in lines if line.forecast.seconds or line.measured.seconds]
    ranked = sorted(timed, key=lambda line: -max(line.forecast.seconds, line.measured.seconds))
    first, rest = ranked[:MOST_GROUPS], ranked[MOST_GROUPS:]
    if rest:
        sums = [sum((getattr(line, side) for line in rest), Forecast()) for side in ("forecast", "measured")]
        first.append(Comparison(f"{len(rest)} others", "", *sums))
    return first


def _draw_groups(axes: Axes, groups: Sequence[Comparison]) -> None:
    """Milliseconds in flight of each group, forecast above measured."""
    for offset, color, side in ((-0.2, GREY, "forecast"), (0.2, BLUE, "measured")):
        values = [getattr(line, side).seconds * 1e3 for line in groups]
        bars = axes.barh([place + offset for place in range(len(groups))], values, 0.36, color=color, label=side)
        axes.bar_label(bars, [f"{value:,.2f}" for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(groups)), [_shortened(line.group) for line in groups], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("milliseconds in flight in a step, by group")
    axes.legend(loc="lower right")


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"..{name[2 - LONGEST_NAME :]}"


def plan_in_words(plan: Plan) -> str:
    """As in "2 workers, simultaneous: 1 table by rows, rest by all_reduce"."""
    workers = "1 worker" if plan.workers == 1 else f"{plan.workers} workers"
    tables = sum(group.layout == "row_sharded" for group in plan.groups)
    others = Counter[str]()
    for group in plan.groups:
        if group.layout != "row_sharded":
            others[group.exchange.name if group.exchange else "the schedule"] += len(group.parameters)
    parts = [f"{tables} {'table' if tables == 1 else 'tables'} by rows"] if tables else []
    ranked = [name for name, _ in others.most_common()]
    parts += [f"{others[name]} by {name}" for name in ranked[1:]]
    parts += [f"{'rest' if parts else 'all'} by {name}" for name in ranked[:1]]
    return f"{workers}, {plan.schedule.name}: {', '.join(parts)}" if parts else f"{workers}, {plan.schedule.name}"


def _step_in_words(ended: Ended) -> str:
    """Forecast beside measured; an unpriced plan has no forecast, a run that ended as it began no measured step."""
    forecast, measured = (
        seconds_text(seconds) if 0 < seconds < math.inf else "none"
        for seconds in (ended.forecast.seconds, ended.step_seconds)
    )
    return f"time of a step: forecast {forecast}, measured {measured}"


def _draw_metric(
    axes: Axes, evaluated: Sequence[Mapping[str, Any]], baseline: Mapping[str, float], simpler: str
) -> None:
    """Glances at a sample as rings; the whole split as a disc apart; the baseline, of the whole split, as a line."""
    name = list(evaluated[-1]["metrics"])[-1]
    values = [line["metrics"][name] for line in evaluated]
    for is_whole, label in ((False, "a random sample of held-out data, the same at every point"), (True, "")):
        found = [(line["step"], line["metrics"][name]) for line in evaluated if line["is_whole"] == is_whole]
        if found:
            fill, style = ("white", "o-" if len(found) >= JOINED_FROM else "o") if not is_whole else (ORANGE, "D")
            label = label or f"all held-out data: {found[-1][1]:.4g}"
            axes.plot(*zip(*found, strict=True), style, color=ORANGE, markerfacecolor=fill, label=label)
    if name in baseline:
        values.append(baseline[name])
        label = f"{simpler}, all held-out data: {baseline[name]:.4g}"
        axes.axhline(baseline[name], color=GREY, linestyle="--", label=label)
    if min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.set_ylabel(f"held-out {name.replace('_', ' ')}")
    axes.legend()
