"""A run at a glance: training loss, held-out metric and throughput against steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["plot"]

BLUE, ORANGE, GREY = "#2563a8", "#c2570c", "#777777"


def plot(lines: Sequence[Mapping[str, Any]], baseline: Mapping[str, float], unit: str) -> Figure:
    """The figure of a run's metrics (`folder.note`); the last metric of the workload's report is the one drawn."""
    progress = [line for line in lines if line["kind"] == "progress"]
    evaluated = [line for line in lines if line["kind"] == "evaluated"]
    figure = Figure(figsize=(9, 9), dpi=120, layout="constrained")
    panels = figure.subplots(3 if evaluated else 2, 1, sharex=True)
    steps = [line["step"] for line in progress]
    panels[0].plot(steps, [line["loss"] for line in progress], color=BLUE, linewidth=1)
    panels[0].set_ylabel("training loss\n(mean over workers)")
    if evaluated:
        _draw_metric(panels[1], evaluated, baseline)
    panels[-1].plot(steps, [line["samples_per_second"] for line in progress], color=BLUE, linewidth=1)
    panels[-1].set_ylabel(f"throughput\n({unit} per second, all workers)")
    panels[-1].set_ylim(bottom=0)
    panels[-1].set_xlabel("optimizer steps")
    for panel in panels:
        panel.grid(alpha=0.3)
    return figure


def _draw_metric(axes: Axes, evaluated: Sequence[Mapping[str, Any]], baseline: Mapping[str, float]) -> None:
    """Glances at the same few batches as rings, joined; the whole split, whose level is its own, as a disc apart; the
    baseline, which is of the whole split, as a line."""
    name = list(evaluated[-1]["metrics"])[-1]
    values = [line["metrics"][name] for line in evaluated]
    for is_whole, style, label in ((False, "o-", "the same few held-out batches"), (True, "D", "all held-out data")):
        found = [(line["step"], line["metrics"][name]) for line in evaluated if line["is_whole"] == is_whole]
        if found:
            fill = ORANGE if is_whole else "white"
            axes.plot(*zip(*found, strict=True), style, color=ORANGE, markerfacecolor=fill, label=label)
    if name in baseline:
        label = f"a simpler method, all held-out data: {baseline[name]:.4g}"
        axes.axhline(baseline[name], color=GREY, linestyle="--", label=label)
    if min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.set_ylabel(f"held-out {name.replace('_', ' ')}")
    axes.legend()
