"""The picture of advice: seconds a step against peak memory, a point a method."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from armillary.plans.advice import MethodPoint

__all__ = ["plot_advice"]

MIB = 1 << 20


def plot_advice(points: Sequence[MethodPoint], sentence: str) -> Figure:
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for one in points:
        x, y = one.seconds * 1e3, one.held_bytes / MIB
        axes.plot(x, y, "o", color="#4169b1", markerfacecolor="#4169b1" if one.is_exact else "white", markersize=8)
        axes.annotate(one.method, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=8)
    front = _frontier(points)
    axes.plot(
        [one.seconds * 1e3 for one in front], [one.held_bytes / MIB for one in front], "-", color="#999999", linewidth=1
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("milliseconds a step (forecast)")
    axes.set_ylabel("MiB a rank at the peak (forecast)")
    axes.set_title(sentence, fontsize=9)
    axes.plot([], [], "o", color="#4169b1", label="exact")
    axes.plot([], [], "o", color="#4169b1", markerfacecolor="white", label="not exact")
    axes.plot([], [], "-", color="#999999", label="nothing is quicker and smaller")
    axes.legend(fontsize=8)
    return figure


def _frontier(points: Sequence[MethodPoint]) -> list[MethodPoint]:
    """Those that no other is quicker than with as little memory."""
    found: list[MethodPoint] = []
    for one in sorted(points, key=lambda one: (one.seconds, one.held_bytes)):
        if not found or one.held_bytes < found[-1].held_bytes:
            found.append(one)
    return found
