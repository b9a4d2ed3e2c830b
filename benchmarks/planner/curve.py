"""The simulator's curve to 1,024 workers, with the measured points it starts from and what it takes for granted."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from armillary import Profile, Topology, plan
from armillary.planning.pricing import Assumptions, Case
from armillary.planning.simulator import simulate
from armillary.plans import seconds_text

__all__ = ["curve"]

MOST_WORKERS = 1024
COLORS = {"100Mbit": "#2563a8", "1000Mbit": "#c2570c", "unshaped": "#3f9b6c"}
NO_LIMIT = 1 << 62


def curve(paths: Sequence[Path]) -> Figure:
    """A panel a workload: samples per second of all workers, measured (dots), forecast for the same cells (crosses),
    and from the cell of most workers on (lines)."""
    found = [(path.stem.rsplit("_", 1)[1], json.loads(path.read_text())) for path in paths]
    workloads = sorted({one["conditions"]["workload"] for _, one in found})
    figure = Figure(figsize=(6.2 * len(workloads), 5.6), dpi=110, layout="constrained")
    for axes, workload in zip(figure.subplots(1, len(workloads), squeeze=False).flatten(), workloads):
        for speed, color in COLORS.items():
            mine = [one for said, one in found if said == speed and one["conditions"]["workload"] == workload]
            if mine:
                _draw(axes, sorted(mine, key=lambda one: one["conditions"]["workers"]), color, speed)
        axes.set(
            xscale="log",
            yscale="log",
            title=workload,
            xlabel="workers",
            ylabel=f"{_unit(found, workload)} per second",
        )
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle("Forecast of data-parallel training to 1,024 workers, from links and stages measured at up to 8")
    figure.supxlabel("\n".join(["Assumed:", *_assumptions(found)]), fontsize=8.5, color="#444444", x=0.01, ha="left")
    return figure


def _unit(found: Sequence[tuple[str, dict[str, Any]]], workload: str) -> str:
    return next(one["unit"] for _, one in found if one["conditions"]["workload"] == workload)


def _draw(axes: Axes, cells: Sequence[dict[str, Any]], color: str, label: str) -> None:
    counts = [one["conditions"]["workers"] for one in cells]
    measured = [one["samples"] * count / _measured(one) for one, count in zip(cells, counts)]
    forecast = [one["samples"] * count / one["forecast"][one["frozen"]]["seconds"] for one, count in zip(cells, counts)]
    axes.plot(counts, measured, "o", color=color, label=f"{label}, measured")
    axes.plot(counts, forecast, "x", color=color, markersize=8, label="forecast")
    last = cells[-1]
    beyond = [counts[-1] << power for power in range((MOST_WORKERS // counts[-1]).bit_length())]
    axes.plot(beyond, [last["samples"] * count / _simulated(last, count) for count in beyond], "-", color=color)


def _measured(one: dict[str, Any]) -> float:
    turns = one["turns"].get(one["frozen"])
    first = next(block["wall_seconds"] for block in one["first"] if block["mode"] == one["frozen"])
    return statistics.median(turns) if turns else float(first)


def _simulated(one: dict[str, Any], workers: int) -> float:
    profile = Profile.from_json(json.dumps(one["profile"]))
    topology = Topology.from_json(json.dumps({**one["topology"], "memory_bytes": NO_LIMIT})).of(workers)
    taken = Assumptions(**one["assumptions"])
    return simulate(plan(profile, topology, assumptions=taken), Case(profile, topology, taken)).step_seconds


def _assumptions(found: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Of the cells of most workers, from which the lines go on."""
    most = max(one["conditions"]["workers"] for _, one in found)
    machine = found[0][1]["conditions"]["machine"]
    lines = []
    for speed in COLORS:
        cells = [one for said, one in found if said == speed and one["conditions"]["workers"] == most]
        for one in cells[:1]:
            topology = Topology.from_json(json.dumps(one["topology"]))
            links = ", ".join(
                f"{link.request} {seconds_text(link.link.latency_seconds)} a message and "
                f"{link.link.bytes_per_second * 8 / 1e9:.3g} Gbit/s"
                for link in topology.requests
            )
            lines.append(f"- {speed}: {links}; {topology.hidden_share:.0%} of a request hides behind compute")
    return [
        *lines,
        f"- links, stages and index work as {most} workers find them that share {machine}; more workers do not slow "
        "one another down",
        f"- merged rows of more than {most} workers follow Heaps' law; every worker as busy as the busiest; no "
        "stragglers; the plan is made anew for every number of workers, by price; memory is left out",
    ]
