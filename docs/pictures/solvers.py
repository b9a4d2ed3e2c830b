"""Which unknowns each pass evaluates, and which are final after it. python docs/pictures/solvers.py"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap
from torch import Tensor

from armillary import solvers

HERE = Path(__file__).parent
UNKNOWNS = 24
COLORS = ListedColormap(["#f2f2f2", "#d9822b", "#3b6fb6"])  # untouched, evaluated, final
WAYS = {
    "in_order": {}, "jacobi": {}, "gs_jacobi(window=8)": {"window": 8}, "jacobi_gs(block=4)": {"block": 4},
}  # fmt: skip


def main() -> None:
    draw = torch.Generator().manual_seed(5)
    weights = torch.randint(0, 3, (UNKNOWNS, UNKNOWNS), generator=draw).tril(-1)
    weights *= torch.rand(UNKNOWNS, UNKNOWNS, generator=draw) < 0.12
    more = torch.randint(0, 5, (UNKNOWNS,), generator=draw)

    def update(states: Tensor, at: slice) -> Tensor:
        return (weights[at] @ states + more[at]) % 5

    start = torch.zeros(UNKNOWNS, dtype=torch.long)
    truth = solvers.solve(update, start, method="in_order").states
    figure, panels = plt.subplots(1, 4, figsize=(11, 3.6), layout="constrained")
    for axes, (title, options) in zip(panels, WAYS.items(), strict=True):
        rows: list[Tensor] = []

        def watched(states: Tensor, at: slice, rows: list[Tensor] = rows) -> Tensor:
            new = update(states, at)
            after = states.clone()
            after[at] = new
            row = (after == truth).long().cumprod(0) * 2
            row[at] = row[at].clamp(min=1)
            rows.append(row)
            return new

        solvers.solve(watched, start, method=title.partition("(")[0], **options)
        axes.imshow(torch.stack(rows), cmap=COLORS, vmin=0, vmax=2, aspect="auto", interpolation="none")
        axes.set(title=f"{title}\n{len(rows)} passes", xlabel="unknown", ylim=(UNKNOWNS + 0.5, -0.5), xticks=[])
        axes.set_yticks([0, UNKNOWNS - 1], ["1", str(UNKNOWNS)])
    panels[0].set_ylabel("pass")
    for place, (name, color) in enumerate((("untouched", "#999999"), ("evaluated", COLORS(1)), ("final", COLORS(2)))):
        panels[1].text(
            0.3, 0.5 - 0.1 * place, f"\u25a0 {name}", color=color, fontsize=11, transform=panels[1].transAxes
        )
    figure.savefig(HERE / "solvers.png", dpi=110)


if __name__ == "__main__":
    main()
