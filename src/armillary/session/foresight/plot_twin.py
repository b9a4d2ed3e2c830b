"""Two trainings drawn: loss against forecast seconds, with the points where they cross; and the gap at equal steps."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from armillary.facts.profile_table import seconds_text
from armillary.session.foresight.gap import Sides

__all__ = ["plot_twin"]

EXACT, OTHER, GREY = "#2563a8", "#c2570c", "#777777"
LONGEST = 48  # characters of a name


def plot_twin(found: Sides, title: str, notes: Sequence[str]) -> Figure:
    """Thick lines are means over seeds, thin ones single seeds; the band is the spread of the gap over seeds.

    Args:
        title: what is shown. notes: one line each, below the picture.
    """
    figure = Figure(figsize=(12.5, 5.2 + 0.17 * len(notes)), dpi=120, layout="constrained")
    losses, gaps = figure.subplots(1, 2, width_ratios=(3, 2))
    _losses(losses, found)
    _gaps(gaps, found)
    figure.suptitle(f"{title}: seconds are forecast, not measured")
    lines = "\n".join(f"- {line}" for line in notes)
    figure.supxlabel(lines, fontsize=8.5, color="#444444", x=0.01, ha="left")
    return figure


def _losses(axes: Axes, found: Sides) -> None:
    for side, color, word in ((found.exact, EXACT, "exact"), (found.other, OTHER, "twin")):
        seconds = [step * side.step_seconds for step in found.steps]
        name = side.name if len(side.name) <= LONGEST else f"{side.name[: LONGEST - 1]}…"
        for losses in side.losses:
            axes.plot(seconds, losses, color=color, linewidth=0.6, alpha=0.4)
        label = f"{word}: {name}, {seconds_text(side.step_seconds)} a step"
        axes.plot(seconds, np.array(side.losses).mean(0), color=color, linewidth=2, label=label)
    for turn in found.turns[1:]:
        axes.axvline(turn.seconds, color=GREY, linestyle=":", linewidth=1)
        axes.annotate(
            f"{turn.seconds:.3g} s", (turn.seconds, 1), xycoords=("data", "axes fraction"), fontsize=8, color=GREY
        )
    axes.set_xlabel("forecast seconds on these links")
    axes.set_ylabel("held-out loss")
    _plain(axes)
    axes.legend(fontsize=8, frameon=False)


def _gaps(axes: Axes, found: Sides) -> None:
    rows = found.at_steps
    steps, gap = [row.at for row in rows], np.array([row.gap for row in rows])
    axes.axhline(0, color=GREY, linewidth=1)
    if found.seeds > 1:
        spread = np.array([row.spread or 0.0 for row in rows])
        axes.fill_between(steps, gap - spread, gap + spread, color=OTHER, alpha=0.2, linewidth=0)
    axes.plot(steps, gap, "o-", color=OTHER, markersize=4)
    axes.set_xlabel("steps")
    axes.set_ylabel("gap: loss of the twin less the exact one")
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
