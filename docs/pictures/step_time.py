"""The README's picture: a step of its table in milliseconds, from the benchmark's results.

python docs/pictures/step_time.py
"""

import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "peers" / "results" / "lm8_100mbit.json"
OURS, OTHERS, INK = "#d9822b", "#3b6fb6", "#222222"
NAMES = {
    "ddp_sparse": "DDP sparse=True",
    "torchrec_by_hand": "TorchRec, tuned by hand",
    "ours": "Armillary",
    "ours_ahead": "Armillary, with prefetch",
}


def measured() -> dict[str, float]:
    """Contender -> median milliseconds of a step, from the first heat that it took part in."""
    found: dict[str, float] = {}
    for heat in json.loads(RESULTS.read_text())["heats"]:
        turns: dict[str, list[float]] = {}
        for block in heat["blocks"]:
            turns.setdefault(block["mode"], []).append(block["wall_seconds"] * 1e3)
        for mode, milliseconds in turns.items():
            found.setdefault(mode, statistics.median(milliseconds))
    return found


def main() -> None:
    milliseconds = measured()
    alone = milliseconds["compute_only"]
    figure, axes = plt.subplots(figsize=(9, 2.9), layout="constrained")
    values = [milliseconds[mode] for mode in NAMES]
    colors = [OURS if mode.startswith("ours") else OTHERS for mode in NAMES]
    bars = axes.barh(list(NAMES.values()), values, color=colors, height=0.62)
    axes.bar_label(bars, [f"{value:,.0f} ms" for value in values], padding=4, fontsize=9, color=INK)
    axes.axvline(alone, color=INK, linestyle="--", linewidth=1, label=f"compute without any exchange: {alone:.0f} ms")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.12 * max(values)), xlabel="milliseconds a step; less is better")
    axes.set_title("A language model on 8 workers at 100 Mbit/s", fontsize=11, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(HERE / "step_time.png", dpi=120)


if __name__ == "__main__":
    main()
