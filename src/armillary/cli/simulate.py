"""What `armillary simulate` does: plays a step of a plan against a clock, draws it, and how workloads would scale.

The scaling curves of `armillary simulate --scaling`: every workload, every number of workers, one picture.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from armillary.cli.launch import run_in_workers
from armillary.cli.names import built_in, find
from armillary.cli.request import (
    AskedMachines,
    AskedPlan,
    AskedWorkload,
    WorkloadOptions,
    read_plan,
    read_profile,
    read_topology,
)
from armillary.cli.resolve import assumed, plan_request_of, said_of, workload_of
from armillary.cli.terminal import as_json, console_here, put
from armillary.planning.clock import Simulation
from armillary.planning.demand import Constraint
from armillary.planning.planner import make_plan
from armillary.planning.pricing import Case, assumptions_behind
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.plans.plan import Plan
from armillary.plans.topology import Topology
from armillary.plans.units import Page, Table, count_text, wrapped
from armillary.profiler.profiler import profile
from armillary.session.plan_job import JobRequest, assumptions_of, model_to_plan, prepared
from armillary.session.run_folder import beside_plan, can_draw, open_folder
from armillary.session.simulate import PROFILED_WORKERS, Scaling, Simulated, plot_scaling, powers_of_two, scaling
from armillary.session.workload import Workload
from armillary.stages.stages import refuse_uncut

__all__ = ["Wanted", "scale", "scaling_asked", "scaling_page", "simulate_asked"]

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
    everyone = [AskedWorkload(name, WorkloadOptions(is_small=wanted.is_small)) for name in built_in()]
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
    lines = [*said_of(topology, topology_file), *_said_of_curves(), *said]
    (out / "scaling.json").write_text(as_json({"assumed": lines, "workloads": found}) + "\n")
    if can_draw(out / "scaling.png"):
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


def _said_of_curves() -> list[str]:
    return [
        f"compute as profiled here on one core, the same for any number of workers; rows read by {PROFILED_WORKERS} "
        "workers were counted, those of more follow Heaps' law, owners share them evenly",
        "one request at a time on a link; pulls block, pushes overlap with backward; no limit of memory; no stragglers",
    ]


class _Scene(NamedTuple):
    """What is played, and what is said of it."""

    name: str
    plan: Plan
    case: Case
    assumptions: tuple[str, ...]


def simulate_asked(
    subject: AskedWorkload | Path, asked: AskedMachines, way: AskedPlan, out: Path, is_json: bool
) -> NoReturn:
    """Plays a step of the plan in a file, or of one made for a workload, and ends the process."""

    def prepare() -> Simulated:
        torch.set_num_threads(1)  # a worker is taken to have one core
        if isinstance(subject, Path):
            return _played(_of_plan(subject, asked.workers, asked.topology_file, asked.profile_file))
        links = asked.topology.of(PROFILED_WORKERS if asked.workers is None else asked.workers)
        task = workload_of(subject)  # first: it may bring methods of its own
        wanted = plan_request_of(way, links.workers)
        task = prepared(task, JobRequest(wanted), links.workers)
        return _played(_of_workload(task, links, asked.topology_file, asked.profile_file, wanted))

    def body(step: Simulated) -> int:
        written = step.save(out)
        if is_json:
            print(as_json(_summary(step.played)))
        else:
            put(console_here(), (*step.page(), f"written: {written}"))
        return 0

    run_in_workers(1, prepare, body)


def scaling_asked(
    subject: AskedWorkload | None, is_small: bool, asked: AskedMachines, out: Path, is_json: bool
) -> NoReturn:
    """Draws the curves of a workload or of all, and ends the process."""

    def prepare() -> Topology:
        torch.set_num_threads(1)
        return asked.topology

    def body(links: Topology) -> int:
        open_folder(out)
        found = scale(Wanted(subject, is_small, asked.workers), links, asked.topology_file, out)
        if is_json:
            print(as_json(found))
        else:
            put(console_here(), scaling_page(found, out))
        return 0

    run_in_workers(1, prepare, body)


def _played(scene: _Scene) -> Simulated:
    return Simulated(scene.name, simulate(scene.plan, scene.case), scene.assumptions)


def _of_plan(path: Path, workers: int | None, topology_file: Path | None, profile_file: Path | None) -> _Scene:
    """A plan with the facts that stand beside it, where no others are given."""
    made = read_plan(path)
    machines_file = topology_file or _beside(path, "topology")
    topology = read_topology(machines_file).of(made.workers if workers is None else workers)
    found = read_profile(profile_file or _beside(path, "profile"))
    case = Case(found, topology, assumptions_behind(made))
    name = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
    return _Scene(name, made, case, _said(case, topology, machines_file, profile_file is not None))


def _beside(path: Path, noun: str) -> Path:
    """The plan's file itself, as `plan --json` prints it; a file that `plan --out` wrote; or that of a run's folder.

    Raises:
        ValueError: nothing of the kind stands there.
    """
    if isinstance(json.loads(path.read_text()).get(noun), dict):
        return path
    own, of_run = beside_plan(path, noun), path.parent / f"{noun}.json"
    found = next((one for one in (own, of_run) if one.exists()), None)
    if found is None:
        raise ValueError(
            f"simulate: a plan is played with its {noun}, and no {own.name} or {of_run.name} stands beside {path}; "
            f"armillary plan WORKLOAD --out {path} writes it, or pass --{noun} FILE"
        )
    return found


def _of_workload(
    task: Workload, topology: Topology, topology_file: Path | None, profile_file: Path | None, request: PlanRequest
) -> _Scene:
    seen = min(topology.workers, PROFILED_WORKERS)
    subject = model_to_plan(task, seed=0)
    found = (
        profile(subject.model, subject.draw(seen), subject.loss, workers=seen)
        if profile_file is None
        else read_profile(profile_file)
    )
    case = Case(found, topology, assumptions_of(subject.optimizer, subject.model))
    made = make_plan(case, request)
    refuse_uncut(made, subject.model, subject.loss, next(iter(subject.draw(1))))
    return _Scene(task.name, made, case, _said(case, topology, topology_file, profile_file is not None))


def _said(case: Case, topology: Topology, topology_file: Path | None, is_given: bool) -> tuple[str, ...]:
    seen = case.profile.workers
    stages = f"stages as {'in the profile' if is_given else 'profiled'}; rows read by {seen} workers were counted"
    more = f", those of {topology.workers} follow Heaps' law" if topology.workers > seen else ""
    return (*said_of(topology, topology_file), f"{stages}{more}", *assumed(case))


def _summary(played: Simulation) -> dict[str, object]:
    return {
        "workers": played.workers,
        "step_seconds": played.step_seconds,
        "processor_seconds": played.processor_seconds,
        "exposed_seconds": played.exposed_seconds,
        "sent_bytes": played.sent_bytes,
        "records": [asdict(record) for record in played.trace.ranks[0]],
    }
