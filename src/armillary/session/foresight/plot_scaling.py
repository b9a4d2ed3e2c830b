"""Scaling curves drawn: throughput against workers, one panel a workload, with what was assumed below."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from armillary.facts.profile_table import count_text, seconds_text
from armillary.session.foresight.scaling import Scaling

__all__ = ["plot_scaling"]

COLORS = ("#2563a8", "#c2570c")
GREY = "#777777"
COLUMNS = 2


def plot_scaling(found: Sequence[Scaling], assumptions: Sequence[str]) -> Figure:
    """
    Args:
        assumptions: one line each, printed on the plot.
    """
    columns = min(COLUMNS, len(found))
    rows = -(-len(found) // columns)
    size = (6.2 * columns + 0.4, 4.2 * rows + 0.8 + 0.2 * len(assumptions))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, one in zip(panels, found):
        _draw(axes, one)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    figure.suptitle("Simulated throughput of data-parallel training (a forecast, not a measurement)", fontsize=13)
    figure.supxlabel("assumed: " + "\n".join(assumptions), fontsize=8.5, color="#444444", x=0.01, ha="left")
    return figure


def _draw(axes: Axes, one: Scaling) -> None:
    counts = [point.workers for point in one.curves[0].points]
    alone = one.curves[0].points[0].samples_per_second / counts[0]
    axes.plot(counts, [alone * count for count in counts], "--", color=GREY, linewidth=1, label="linear")
    for curve, color in zip(one.curves, COLORS):
        rates = [point.samples_per_second for point in curve.points]
        axes.plot(counts, rates, "o-", color=color, markersize=4, label=curve.name)
        share = rates[-1] / (alone * counts[-1])
        axes.annotate(
            f"{count_text(rates[-1])} ({share:.0%})", (counts[-1], rates[-1]), textcoords="offset points",
            xytext=(0, -13), ha="right", fontsize=8, color=color,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts], rotation=45, fontsize=8)
    axes.set_xlabel("workers")
    axes.set_ylabel(f"{one.unit} per second, all workers")
    batch = f"{one.samples:g} {one.unit} a worker and step"
    axes.set_title(f"{one.workload}: {batch}, compute {seconds_text(one.compute_seconds)}", fontsize=10)
    axes.grid(alpha=0.3, which="major")
    axes.legend(fontsize=8, loc="upper left")
