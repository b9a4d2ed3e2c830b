"""The README's picture: dense gradients go round, table rows go to their owners. python docs/pictures/ways.py"""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
DENSE, ROWS, INK = "#3b6fb6", "#d9822b", "#222222"
WORKERS = ((0.17, 0.74), (0.83, 0.74), (0.83, 0.2), (0.17, 0.2))


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    _panel(left, "Dense weights: gradients are summed round a ring", DENSE)
    for place in range(4):
        _arrow(left, WORKERS[place], WORKERS[(place + 1) % 4], DENSE, curve=0.0)
    _panel(right, "Tables read by row: rows go to and from their owners", ROWS)
    for place in range(4):
        for other in range(4):
            if place != other:
                _arrow(right, WORKERS[place], WORKERS[other], ROWS, curve=0.1)
    figure.savefig(HERE / "ways.png", dpi=120)


def _panel(axes: Axes, title: str, color: str) -> None:
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")
    axes.set_title(title, color=color, fontsize=11, fontweight="bold")
    for number, (x, y) in enumerate(WORKERS):
        axes.add_patch(FancyBboxPatch((x - 0.1, y - 0.12), 0.2, 0.24, "round,pad=0.02", fc="white", ec=INK, lw=1.2))
        axes.text(x, y + 0.06, f"worker {number}", ha="center", va="center", fontsize=9, color=INK)
        if color == DENSE:
            axes.text(x, y - 0.05, "all weights", ha="center", va="center", fontsize=8, color=DENSE)
        else:
            for slot in range(4):
                shade = ROWS if slot == number else "#eeeeee"
                corner = (x - 0.06 + 0.03 * slot, y - 0.1)
                axes.add_patch(plt.Rectangle(corner, 0.026, 0.09, fc=shade, ec="#999999", lw=0.5))


def _arrow(axes: Axes, begins: tuple[float, float], ends: tuple[float, float], color: str, curve: float) -> None:
    axes.add_patch(
        FancyArrowPatch(
            begins,
            ends,
            connectionstyle=f"arc3,rad={curve}",
            arrowstyle="-|>",
            mutation_scale=11,
            color=color,
            shrinkA=40,
            shrinkB=40,
            lw=1.4,
            alpha=0.85,
        )
    )


if __name__ == "__main__":
    main()
