"""Scaling curves drawn: throughput against workers, one panel a workload, with what was assumed below."""

from collections.abc import Sequence
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from armillary.plans.units import count_text, seconds_text
from armillary.session.simulate import Scaling

__all__ = ["plot_scaling"]

# Colour, line and marker, and whether the last figure stands above its curve.
STYLES = (("#2563a8", "o-", True), ("#c2570c", "s:", False))
GREY = "#777777"
COLUMNS = 2
LETTERS, SMALL_LETTERS = 8.5, 14  # that fit on an inch, of the title and of what stands below


def plot_scaling(found: Sequence[Scaling], assumptions: Sequence[str]) -> Figure:
    """Percentages are of what the workers would do if nothing crossed between them.

    Args:
        assumptions: one line each, printed on the plot.
    """
    columns = min(COLUMNS, len(found))
    rows = -(-len(found) // columns)
    inches = 6.2 * columns + 0.4
    below = ["percent: of compute alone. Assumed:"]
    for line in assumptions:
        below += wrap(f"- {line}", int(SMALL_LETTERS * inches), subsequent_indent="  ")
    size = (inches, 4.2 * rows + 0.8 + 0.2 * len(below))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, one in zip(panels, found):
        _draw(axes, one)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    title = "Forecast throughput of data-parallel training, simulated"
    figure.suptitle("\n".join(wrap(title, int(LETTERS * inches))), fontsize=13)
    figure.supxlabel("\n".join(below), fontsize=8.5, color="#444444", x=0.01, ha="left")
    return figure


def _draw(axes: Axes, one: Scaling) -> None:
    counts = [point.workers for point in one.curves[0].points]
    alone = one.samples / one.compute_seconds
    axes.plot(counts, [alone * count for count in counts], "--", color=GREY, linewidth=1, label="compute alone")
    for curve, (color, marker, above) in zip(one.curves, STYLES):
        rates = [point.samples_per_second for point in curve.points]
        axes.plot(counts, rates, marker, color=color, markersize=5, markerfacecolor="none", label=curve.name)
        share = rates[-1] / (alone * counts[-1])
        axes.annotate(
            f"{count_text(rates[-1])}\n{share:.0%}", (counts[-1], rates[-1]), textcoords="offset points",
            xytext=(8, 13 if above else -13), va="center", fontsize=8, color=color,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts], fontsize=8)
    axes.set_xlim(counts[0] * 0.8, counts[-1] * 2.6)
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.set_ylabel(f"{one.unit} per second, all workers")
    batch = f"{one.samples:,.0f} {one.unit} a worker and step"
    axes.set_title(f"{one.workload}: {batch}, compute {seconds_text(one.compute_seconds)}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", frameon=False)
