"""The scaling curves of `armillary simulate --scaling`: every workload, every number of workers, one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from armillary.cli.asked import AskedWorkload
from armillary.cli.find import built_in, find
from armillary.cli.granted import workload_of
from armillary.cli.machines import said_of
from armillary.cli.page import console_here
from armillary.cli.show import as_json
from armillary.facts.profile_table import count_text
from armillary.facts.table import Page, Table, wrapped
from armillary.facts.topology import Topology
from armillary.planning.demand import Constraint
from armillary.session.foresight.scaling import PROFILED_WORKERS, Scaling, powers_of_two, scaling
from armillary.session.pictures import can_draw

__all__ = ["Wanted", "scale", "scaling_page"]

MOST_WORKERS = 1024
WAYS: Mapping[str, Mapping[str, Constraint]] = {"chosen plan": {}, "all_reduce everything": {"*": "all_reduce"}}
# Instead of data that are not on this machine.
STAND_INS: Mapping[str, Mapping[str, Any]] = {"recommender": {"data": "latent_factors", "batch_size": 64}}


class Wanted(NamedTuple):
    """What to draw.

    subject: one workload, or None for all that come with the package; is_small: these in their small versions.
    most: numbers of workers are the powers of two up to it.
    """

    subject: AskedWorkload | None
    is_small: bool
    most: int | None


def scale(wanted: Wanted, topology: Topology, topology_file: Path | None, out: Path) -> list[Scaling]:
    """Simulates the workloads and draws the curves into `out`."""
    counts = [
        count
        for count in powers_of_two(MOST_WORKERS if wanted.most is None else wanted.most)
        if count >= _fewest(topology)
    ]
    console = console_here(is_aside=True)
    found, said = [], []
    everyone = [AskedWorkload(name, is_small=wanted.is_small) for name in built_in()]
    for subject in everyone if wanted.subject is None else [wanted.subject]:
        one = subject.name
        console.print(f"profiling and simulating {one} ...", style="dim")
        try:
            found.append(scaling(workload_of(subject), topology, counts, WAYS))
        except ValueError as error:
            if one not in STAND_INS or subject.is_small or subject.settings:
                raise
            console.print(wrapped(f"{one}: {error}; made-up data stand in for it"), style="yellow")
            found.append(scaling(find(one, STAND_INS[one]), topology, counts, WAYS))
            options = ", ".join(f"{key}={value}" for key, value in STAND_INS[one].items())
            said.append(f"{one} with made-up data ({options})")
    lines = [*said_of(topology, topology_file), *_said(), *said]
    (out / "scaling.json").write_text(as_json({"assumed": lines, "workloads": found}) + "\n")
    if can_draw(out / "scaling.png"):
        from armillary.session.foresight.plot_scaling import plot_scaling

        plot_scaling(found, lines).savefig(out / "scaling.png")
    return found


def scaling_page(found: Sequence[Scaling], out: Path) -> Page:
    """Both curves of every workload, with the share of what compute alone would allow."""
    rows = []
    for one in found:
        for curve in one.curves:
            alone = one.samples / one.compute_seconds
            for point in curve.points:
                rate = f"{count_text(point.samples_per_second)} {one.unit}/s"
                share = f"{point.samples_per_second / (alone * point.workers):.0%}"
                times = (f"{point.step_seconds * 1e3:,.1f}", f"{point.exposed_seconds * 1e3:,.1f}")
                rows.append((one.workload, curve.name, str(point.workers), *times, rate, share))
    header = ("workload", "plan", "workers", "step ms", "not hidden ms", "throughput", "of compute alone")
    written = ", ".join(str(out / name) for name in ("scaling.json", "scaling.png") if (out / name).exists())
    words = "Simulated throughput of the chosen plan and of a plan that all-reduces everything, by number of workers."
    return words, Table(header, rows, (0, 1)), f"written: {written}"


def _fewest(topology: Topology) -> int:
    """Fewer than a node of a topology of several are not asked for."""
    return topology.workers_per_node if topology.nodes > 1 else 1


def _said() -> list[str]:
    return [
        f"compute as profiled here on one core, the same for any number of workers; rows read by {PROFILED_WORKERS} "
        "workers were counted, those of more follow Heaps' law, owners share them evenly",
        "one request at a time on a link; pulls block, pushes overlap with backward; no limit of memory; no stragglers",
    ]
