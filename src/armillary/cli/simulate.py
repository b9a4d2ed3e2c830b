"""What `armillary simulate` does: plays a step of a plan against a clock, draws it, and how workloads would scale."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from armillary.cli.asked import AskedMachines, AskedPlan, AskedWorkload, read_plan, read_profile, read_topology
from armillary.cli.granted import plan_request_of, workload_of
from armillary.cli.machines import assumed, said_of
from armillary.cli.page import console_here, put
from armillary.cli.scaling import Wanted, scale, scaling_page
from armillary.cli.show import as_json
from armillary.cli.workers import run_in_workers
from armillary.facts.plan import Plan
from armillary.facts.topology import Topology
from armillary.planning.planner import make_plan
from armillary.planning.pricing import Case, assumptions_behind
from armillary.planning.request import PlanRequest
from armillary.planning.simulation import Simulation
from armillary.planning.simulator import simulate
from armillary.runtime.profiling.profiler import profile
from armillary.session.cyclic.stages import refuse_uncut
from armillary.session.decide import JobRequest, assumptions_of, subject_of
from armillary.session.folder import beside_plan, open_folder
from armillary.session.foresight.scaling import PROFILED_WORKERS
from armillary.session.foresight.simulate import Simulated
from armillary.session.prepared import prepared
from armillary.session.workload import Workload

__all__ = ["scaling_asked", "simulate_asked"]


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
    subject = subject_of(task, seed=0)
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
