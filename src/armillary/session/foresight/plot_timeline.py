"""A simulated step drawn: processor, links, and below them what is exposed."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from armillary.planning.clock import BusySpan
from armillary.planning.simulation import Simulation
from armillary.session.foresight.timeline import LANES

__all__ = ["plot_timeline"]

COLORS = {
    "forward": "#7fb3e6",
    "backward": "#2563a8",
    "gather rows": "#f2b66d",
    "merge rows": "#f2b66d",
    "pack": "#c9c9c9",
    "call": "#ded3b8",
    "carry": "#b9a3d6",
    "encode": "#5f9ea0",
    "decode": "#5f9ea0",
    "update": "#8a8a8a",
    "pull": "#3f9b6c",
    "push": "#7a5aa6",
    "meet": "#4c3575",
    "send": "#7a5aa6",
    "all-reduce": "#7a5aa6",
    "wait": "#d1493f",
}
MEANINGS = {
    "forward": "forward",
    "backward": "backward",
    "gather rows": "index work on rows",
    "pack": "gradients into buckets",
    "call": "calls of requests",
    "carry": "push, what compute cannot hide",
    "encode": "coding of edges",
    "update": "optimizer",
    "pull": "pull (before forward, blocking)",
    "push": "push (gradients)",
    "meet": "meet (weights)",
    "send": "to another stage",
    "all-reduce": "gradients of replicas",
    "wait": "not hidden",
}
SMALLEST_LABEL = 0.045  # share of the step that a bar must take to carry its name
CHARACTERS = 150  # that fit in the width of the picture
HEIGHT = 0.72
MOST_IN_LINE = 6  # meanings of colors


def plot_timeline(simulation: Simulation, title: str, assumptions: Sequence[str]) -> Figure:
    """
    Args:
        title: what is shown. assumptions: one line each, below the picture.
    """
    lanes = [lane for lane in LANES if any(span.lane == lane for span in simulation.spans)]
    size = (13, 2.2 + 0.75 * len(lanes) + 0.17 * (1 + len(assumptions)))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.subplots()
    for row, lane in enumerate(reversed(lanes)):
        _draw(axes, [span for span in simulation.spans if span.lane == lane], row, simulation.step_seconds)
    axes.set_yticks(range(len(lanes)), [LANES[lane].replace(": ", ":\n") for lane in reversed(lanes)])
    axes.set_ylim(-0.6, len(lanes) - 0.4)
    axes.set_xlim(0, simulation.step_seconds * 1e3)
    axes.set_xlabel("ms since the step began")
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    seen = {span.action for span in simulation.spans} | ({"gather rows"} if _is_merging(simulation) else set())
    patches = [Patch(color=COLORS[action], label=text) for action, text in MEANINGS.items() if action in seen]
    lines_of_legend = -(-len(patches) // MOST_IN_LINE)
    columns = -(-len(patches) // lines_of_legend)
    axes.set_title(f"{title}: {_summary(simulation)}", loc="left", fontsize=11, pad=10 + 16 * lines_of_legend)
    axes.legend(handles=patches, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=8)
    lines = "\n".join(f"- {line}" for line in assumptions)
    figure.supxlabel(f"Assumed:\n{lines}", fontsize=8.5, color="#444444", x=0.01, ha="left")
    return figure


def _is_merging(simulation: Simulation) -> bool:
    return any(span.action == "merge rows" for span in simulation.spans)


def _summary(simulation: Simulation) -> str:
    exposed, sent = sum(simulation.exposed_seconds.values()), sum(simulation.sent_bytes.values())
    return (
        f"{simulation.workers} workers, step {simulation.step_seconds * 1e3:.1f} ms: processor "
        f"{simulation.processor_seconds * 1e3:.1f} ms, not hidden {exposed * 1e3:.1f} ms; "
        f"{sent / 1e6:.2f} MB sent per worker"
    )


def _draw(axes: Axes, spans: Sequence[BusySpan], row: int, step_seconds: float) -> None:
    bars = [(span.start_seconds * 1e3, span.seconds * 1e3) for span in spans]
    colors = [COLORS[span.action] for span in spans]
    axes.broken_barh(bars, (row - HEIGHT / 2, HEIGHT), facecolors=colors, edgecolor="white", linewidth=0.6)
    for span in spans:
        share = span.seconds / step_seconds
        if share >= SMALLEST_LABEL:
            middle = (span.start_seconds + span.seconds / 2) * 1e3
            axes.text(middle, row, _fitted(span, share), ha="center", va="center", fontsize=7.5, color=_ink(span))


def _label(span: BusySpan) -> str:
    return span.what if span.lane != "processor" or span.action in ("forward", "backward") else span.action


def _fitted(span: BusySpan, share: float) -> str:
    """As much as the bar has room for: name and duration, the name, or the beginning of it."""
    room, name, duration = int(share * CHARACTERS), _label(span), f"{span.seconds * 1e3:.3g} ms"
    if len(name) + len(duration) + 2 <= room:
        return f"{name}, {duration}"
    if max(len(name), len(duration)) <= room:
        return f"{name}\n{duration}"
    return name if len(name) <= room else name[: max(1, room - 1)] + "…"


def _ink(span: BusySpan) -> str:
    return "black" if span.action in ("forward", "gather rows", "merge rows", "pack", "carry") else "white"
