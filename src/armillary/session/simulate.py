"""Plays a step of a plan for a script, and shows how a workload would scale, as `armillary simulate`; in a drawing too.

The model is profiled once, in this process. What a step computes stays the same for every number of workers, so the
curves show what the exchanges make of it. Rows that more workers read follow Heaps' law. `plot_scaling` draws
throughput against workers, one panel a workload, with what was assumed below.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from armillary.planning.clock import Simulation, chrome_trace
from armillary.planning.demand import Constraint
from armillary.planning.planner import plan
from armillary.planning.pricing import Assumptions, Case, assumptions_behind
from armillary.planning.simulator import simulate as play
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology
from armillary.plans.units import Page, Table, count_text, page_text, seconds_text
from armillary.profiler.profiler import profile
from armillary.session.plan_job import assumptions_of, model_to_plan
from armillary.session.run_folder import open_folder
from armillary.session.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "PROFILED_WORKERS",
    "Curve",
    "Point",
    "Scaling",
    "Simulated",
    "plot_scaling",
    "powers_of_two",
    "scaling",
    "simulate",
]

PROFILED_WORKERS = 8
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Point:
    """One number of workers. samples_per_second: of all of them together."""

    workers: int
    step_seconds: float
    exposed_seconds: float
    samples_per_second: float


@dataclass(frozen=True)
class Curve:
    """One way to plan, over the numbers of workers."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Scaling:
    """One workload. samples: in one worker's batch. compute_seconds: of one step without any exchange."""

    workload: str
    unit: str
    samples: float
    compute_seconds: float
    profiled_workers: int
    curves: tuple[Curve, ...]


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, up to `most`."""
    return tuple(1 << power for power in range(most.bit_length()))


def scaling(
    workload: Workload,
    topology: Topology,
    counts: Sequence[int],
    ways: Mapping[str, Mapping[str, Constraint]],
    seed: int = 0,
) -> Scaling:
    """Simulates every way to plan for every number of workers; memory limits are left out.

    Args:
        topology: machines of which there are as many as it takes. counts: numbers of workers.
        ways: to plan, by name: constraints, as in `plan`.

    Raises:
        ValueError: a number of workers that does not fill nodes.
    """
    subject = model_to_plan(workload, seed)
    batches = list(subject.draw(PROFILED_WORKERS))
    found = profile(subject.model, batches, subject.loss, workers=PROFILED_WORKERS)
    samples = sum(workload.samples(batch) for batch in batches) / len(batches)
    taken, machines = assumptions_of(subject.optimizer, subject.model), replace(topology, memory_bytes=NO_LIMIT)
    curves = []
    for name, constraints in ways.items():
        points = [_point(found, machines.of(count), constraints, taken, samples) for count in counts]
        curves.append(Curve(name, tuple(points)))
    seconds = sum(stage.forward_seconds + stage.backward_seconds for stage in found.stages)
    return Scaling(workload.name, workload.unit, samples, seconds, PROFILED_WORKERS, tuple(curves))


def _point(
    found: Profile, topology: Topology, constraints: Mapping[str, Constraint], taken: Assumptions, samples: float
) -> Point:
    made = plan(found, topology, constraints=constraints, assumptions=taken)
    played = play(made, Case(found, topology, taken))
    exposed, seconds = sum(played.exposed_seconds.values()), played.step_seconds
    return Point(topology.workers, seconds, exposed, samples * topology.workers / seconds)


@dataclass(frozen=True)
class Simulated:
    """A step as it was played, under a title, with what was taken for granted. It prints."""

    title: str
    played: Simulation
    assumptions: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        return self.played.step_seconds

    def save(self, folder: str | Path) -> Path:
        """Writes timeline.json, which Perfetto and chrome://tracing open; its path.

        Raises:
            ValueError: the folder cannot be written.
        """
        open_folder(Path(folder))
        trace = Path(folder) / "timeline.json"
        trace.write_text(json.dumps(chrome_trace(self.played)))
        return trace

    def page(self) -> Page:
        """What it prints, its table apart."""
        played = self.played
        exposed, rows = played.exposed_seconds, []
        for flight in played.flights:
            times = (f"{flight.launch_seconds * 1e3:,.2f}", f"{flight.seconds * 1e3:,.2f}")
            rows.append((flight.group, flight.action, *times, f"{flight.sent_bytes / 1e3:,.1f}"))
        table = Table(("exchange", "action", "starts ms", "in flight ms", "sent kB"), rows, (0, 1))
        waits = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in exposed.items()) or "nothing"
        total = f"step of {played.workers} workers: {played.step_seconds * 1e3:.2f} ms"
        busy = f"processor {played.processor_seconds * 1e3:.2f} ms"
        return f"{total}: {busy}, not hidden {sum(exposed.values()) * 1e3:.2f} ms ({waits})", table, *self.assumptions

    def __str__(self) -> str:
        return page_text(self.page())


def simulate(plan: Plan, profile: Profile, topology: Topology) -> Simulated:
    """Plays one step of the plan on these machines, in this process, which needs no other. `print` it, or `.save` it.

    Args:
        profile: of the model that the plan was made for.
        topology: need not be the one that the plan was made for; `topology.of(n)` is the same with n workers.

    Raises:
        ValueError: the plan is for another model, nobody priced it, or its schedule is not played yet.
    """
    played = play(plan, Case(profile, topology, assumptions_behind(plan)))
    return Simulated(f"plan for {plan.workers} workers", played)


# Colour, line and marker, and whether the last figure stands above its curve.
STYLES = (("#2563a8", "o-", True), ("#c2570c", "s:", False))
GREY = "#777777"
COLUMNS = 2
LETTERS, SMALL_LETTERS = 8.5, 14  # that fit on an inch, of the title and of what stands below


def plot_scaling(found: Sequence[Scaling], assumptions: Sequence[str]) -> "Figure":
    """Percentages are of what the workers would do if nothing crossed between them.

    Args:
        assumptions: one line each, printed on the plot.
    """
    from matplotlib.figure import Figure

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


def _draw(axes: "Axes", one: Scaling) -> None:
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
