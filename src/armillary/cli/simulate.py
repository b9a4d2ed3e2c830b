"""`armillary simulate`: a step of a plan against a clock, drawn; and how workloads would scale."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from armillary.cli.machines import Gbit, LatencyUs, assumed, machines, said_of
from armillary.cli.options import (
    AsJson,
    Corpus,
    IsSmall,
    ProfileFile,
    Set,
    TopologyFile,
    read_plan,
    read_profile,
    workload_of,
)  # fmt: skip
from armillary.cli.scaling import Wanted, scale, scaling_text
from armillary.cli.schedule_options import Schedule, chosen
from armillary.cli.show import as_json
from armillary.cli.workers import run_in_workers
from armillary.facts.choice import Choice
from armillary.facts.plan import SIMULTANEOUS, Plan
from armillary.facts.topology import Topology
from armillary.planning.planner import plan
from armillary.planning.pricing import Case, assumptions_behind
from armillary.planning.simulation import Simulation
from armillary.planning.simulator import simulate
from armillary.runtime.watch.profiler import profile
from armillary.session.decide import assumptions_of, subject_of
from armillary.session.folder import open_folder
from armillary.session.foresight.scaling import PROFILED_WORKERS
from armillary.session.foresight.simulate import Simulated
from armillary.session.workload import Workload

__all__ = ["simulate_command"]

Subject = Annotated[
    str | None,
    typer.Argument(
        metavar="PLAN|WORKLOAD", help="A plan.json, with profile.json beside it; or a workload to plan for."
    ),
]
Count = Annotated[int | None, typer.Option(help="Workers to simulate. (default: the plan's; 8)", show_default=False)]


class _Scene(NamedTuple):
    """What is played, and what is said of it."""

    name: str
    plan: Plan
    case: Case
    assumptions: tuple[str, ...]


def simulate_command(
    subject: Subject = None,
    workers: Count = None,
    topology_file: TopologyFile = None,
    profile_file: ProfileFile = None,
    gbit: Gbit = 1.0,
    latency_us: LatencyUs = 100.0,
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Curves to --workers (default 1024) instead; of all workloads if none.")
    ] = False,
    small: IsSmall = False,
    corpus: Corpus = "",
    options: Set = [],  # noqa: B006  typer copies it
    schedule: Schedule = SIMULTANEOUS.name,
    out: Annotated[Path, typer.Option(help="Folder for the trace and the picture.")] = Path(),
    json: AsJson = False,
) -> None:
    """Plays a step of a plan, or of the plan made for WORKLOAD, for any number of workers in this one process.

    Writes timeline.json, which chrome://tracing and Perfetto open, and timeline.png; with --scaling scaling.json and
    scaling.png. The links are those of --topology, of the topology.json beside the plan, or assumed.
    """

    def body() -> int:
        torch.set_num_threads(1)  # a worker is taken to have one core
        open_folder(out)
        if scaling:
            found = scale(
                Wanted(subject, small, workers), machines(topology_file, gbit, latency_us), topology_file, out
            )
            print(as_json(found) if json else scaling_text(found, out))
            return 0
        if subject is None:
            raise ValueError("simulate: want a plan.json or a WORKLOAD; or --scaling, which takes all workloads")
        if subject.endswith(".json"):
            scene = _of_plan(Path(subject), workers, topology_file, profile_file)
        else:
            task = workload_of(subject, options, corpus, small)
            links = machines(topology_file, gbit, latency_us).of(PROFILED_WORKERS if workers is None else workers)
            scene = _of_workload(task, links, topology_file, profile_file, chosen(schedule))
        step = Simulated(scene.name, simulate(scene.plan, scene.case), scene.assumptions)
        written = ", ".join(map(str, step.save(out)))
        print(as_json(_summary(step.played)) if json else f"{step}\nwritten: {written}")
        return 0

    run_in_workers(1, body)


def _of_plan(path: Path, workers: int | None, topology_file: Path | None, profile_file: Path | None) -> _Scene:
    """A plan with the facts that stand beside it, where no others are given."""
    made = read_plan(path)
    machines_file = topology_file or path.parent / "topology.json"
    topology = machines(machines_file, 1.0, 0.0).of(made.workers if workers is None else workers)
    found = read_profile(profile_file or path.parent / "profile.json")
    case = Case(found, topology, assumptions_behind(made))
    name = f"{path.parent.name}/{path.name}" if path.parent.name else path.name
    return _Scene(name, made, case, _said(case, topology, machines_file, profile_file is not None))


def _of_workload(
    task: Workload, topology: Topology, topology_file: Path | None, profile_file: Path | None, schedule: Choice
) -> _Scene:
    seen = min(topology.workers, PROFILED_WORKERS)
    subject = subject_of(task, seed=0)
    found = (
        profile(subject.model, subject.draw(seen), subject.loss, workers=seen)
        if profile_file is None
        else read_profile(profile_file)
    )
    taken = assumptions_of(subject.optimizer)
    made = plan(found, topology, assumptions=taken, schedule=schedule)
    case = Case(found, topology, taken)
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
        "records": [asdict(record) for record in played.trace.records],
    }
