"""A run at a glance: training loss, held-out metric and throughput against steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["plot"]

BLUE, ORANGE, GREY = "#2563a8", "#c2570c", "#777777"


def plot(lines: Sequence[Mapping[str, Any]], baseline: Mapping[str, float], unit: str) -> Figure:
    """The figure of a run's metrics (`folder.note`); the last held-out metric in `report` is the one drawn."""
    progress = [line for line in lines if line["kind"] == "progress"]
    evaluated = [line for line in lines if line["kind"] == "evaluated"]
    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_loss(above, progress)
    if evaluated:
        _draw_metric(above, evaluated, baseline)
    steps = [line["step"] for line in progress]
    below.plot(steps, [line["samples_per_second"] for line in progress], color=BLUE, linewidth=1)
    below.set_ylabel(f"throughput ({unit} per second, all workers)")
    below.set_xlabel("optimizer steps")
    below.set_ylim(bottom=0)
    below.grid(alpha=0.3)
    return figure


def _draw_loss(axes: Axes, progress: Sequence[Mapping[str, Any]]) -> None:
    steps = [line["step"] for line in progress]
    axes.plot(steps, [line["loss"] for line in progress], color=BLUE, linewidth=1, label="training loss")
    axes.set_ylabel("training loss (mean over workers)", color=BLUE)
    axes.grid(alpha=0.3)


def _draw_metric(axes: Axes, evaluated: Sequence[Mapping[str, Any]], baseline: Mapping[str, float]) -> None:
    name = list(evaluated[-1]["metrics"])[-1]
    other = axes.twinx()
    values = [line["metrics"][name] for line in evaluated]
    other.plot([line["step"] for line in evaluated], values, "o-", color=ORANGE, markersize=4)
    label = f"held-out {name.replace('_', ' ')}"
    other.set_ylabel(label, color=ORANGE)
    if min(values) > 0 and max(values) > 20 * min(values):
        other.set_yscale("log")
    if name in baseline:
        other.axhline(baseline[name], color=GREY, linestyle="--", linewidth=1)
        text = f"baseline {baseline[name]:.4g}"
        other.annotate(text, (0.99, baseline[name]), xycoords=("axes fraction", "data"), ha="right", va="bottom")
