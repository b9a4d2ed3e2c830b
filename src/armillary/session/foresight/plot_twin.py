"""Two trainings drawn: held-out loss against forecast seconds."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from armillary.facts.profile_table import seconds_text
from armillary.session.foresight.gap import Sides

__all__ = ["plot_twin"]

EXACT, OTHER = "#2563a8", "#c2570c"
LONGEST = 48  # characters of a name


def plot_twin(found: Sides, title: str, notes: Sequence[str]) -> Figure:
    """Thick lines are means over seeds, thin ones single seeds.

    Args:
        title: what is shown. notes: one line each, below the picture.
    """
    figure = Figure(figsize=(8.5, 5.2 + 0.17 * len(notes)), dpi=120, layout="constrained")
    _losses(figure.subplots(), found)
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
    axes.set_xlabel("forecast seconds on these links")
    axes.set_ylabel("held-out loss")
    _plain(axes)
    axes.legend(fontsize=8, frameon=False)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
