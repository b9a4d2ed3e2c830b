"""A run at a glance: training loss, held-out metric and throughput against steps."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from armillary.facts.plan import Plan
from armillary.facts.profile_table import seconds_text
from armillary.session.events import Ended
from armillary.session.workload import Workload, baseline_name

__all__ = ["plan_in_words", "plot"]

BLUE, ORANGE, GREY = "#2563a8", "#c2570c", "#777777"
JOINED_FROM = 3  # points: a line through fewer shows a curve that nobody has seen


def plot(lines: Sequence[Mapping[str, Any]], ended: Ended, workload: Workload, plan: Plan) -> Figure:
    """The figure of a run's metrics (`folder.note`); the last metric of the workload's report is the one drawn."""
    progress = [line for line in lines if line["kind"] == "progress"]
    evaluated = [line for line in lines if line["kind"] == "evaluated"]
    figure = Figure(figsize=(9, 9), dpi=120, layout="constrained")
    figure.suptitle(f"{workload.name}, {date.today()}\n{plan_in_words(plan)}\n{_step_in_words(ended)}", fontsize=11)
    panels = figure.subplots(3 if evaluated else 2, 1, sharex=True)
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
