"""What was asked on the command line, turned into what the library takes: workloads and requests.

What is said of the machines of a simulation, and of what is assumed of them.
"""

from pathlib import Path

import torch

from armillary.cli.names import find, small
from armillary.cli.request import AskedPlan, AskedWorkload, read_plan, read_profile, read_topology
from armillary.planning.constraints import names_of
from armillary.planning.constraints import refuse_unknown as refuse_unknown_constraint
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest, named
from armillary.plans.topology import Topology
from armillary.plans.units import seconds_text
from armillary.schedules.registry import read
from armillary.session.plan_job import JobRequest
from armillary.session.watched_steps import parameter_facts
from armillary.session.workload import Workload

__all__ = ["assumed", "job_request_of", "plan_request_of", "refuse_unnamed", "said_of", "workload_of"]


def said_of(topology: Topology, topology_file: Path | None) -> list[str]:
    """What the links are and where that is known from."""
    sides = [("between", topology.between)] if topology.nodes > 1 else []
    sides += [("inside", topology.inside)] if topology.workers_per_node > 1 else []
    speeds = [
        f"{side} nodes {link.bytes_per_second * 8 / 1e9:.3g} Gbit/s and {seconds_text(link.latency_seconds)} a message"
        for side, link in sides or [("inside", topology.inside)]
    ]
    source = "given by hand" if topology_file is None else f"from {topology_file.name}"
    kinds = "each kind of request as measured" if topology.requests else "alike for every kind of request"
    return [
        f"links {source}: {', '.join(speeds)}; {kinds}; whatever their number, workers do not slow one another down"
    ]


def assumed(case: Case) -> list[str]:
    """What a simulated step takes for granted besides links and stages."""
    measured = case.topology.processor is not None
    row = f"index work {case.row_seconds(1024) * 1e6:.2g} us a row of 1 KiB"
    memory = f"whole tensors at {case.memory_bytes_per_second / 1e9:.3g} GB/s"
    slots = sorted(case.by_slots(fact for fact in case.profile.parameters if fact.requires_grad))
    return [
        f"{row}, {memory} ({'measured' if measured else 'round figures'}); optimizer with "
        f"{' or '.join(map(str, slots))} tensors of state",
        f"one request at a time on a link; {case.topology.hidden_share:.0%} of a push can hide behind compute",
        "every worker as busy as the busiest; pulls block, prefetch is not played",
    ]


def workload_of(asked: AskedWorkload) -> Workload:
    """
    Raises:
        ValueError: no such workload, or an option it refuses.
    """
    return find(asked.name, {**(small(asked.name) if asked.is_small else {}), **asked.settings})


def plan_request_of(asked: AskedPlan, workers: int) -> PlanRequest:
    """
    Args:
        workers: that are planned for.

    Raises:
        ValueError: a method is on no shelf, or refuses its options; or two things exclude one another.
    """
    request = PlanRequest(
        asked.constraints,
        asked.lazy,
        schedule=named(asked.schedule),
        allow=asked.allow,
        rule=asked.rule,
        edge=asked.edge,
        edge_back=asked.edge_back,
    )
    for pattern, constraint in request.constraints.items():
        refuse_unknown_constraint(pattern, constraint)
    read(request.schedule, workers).schedule()  # its table may refuse what its options did not
    return request


def job_request_of(asked: AskedPlan, workers: int, planned: int | None = None) -> JobRequest:
    """
    Args:
        workers: of the job; a topology that is given says how many are planned for.
        planned: plan for so many of its machines instead.

    Raises:
        ValueError: a file cannot be read, something is not of the form that is wanted, or two exclude one another.
    """
    plan = None if asked.plan_file is None else read_plan(asked.plan_file)
    if plan is not None and any((asked.constraints, asked.lazy, asked.allow, asked.edges, asked.edge_backs)):
        raise ValueError(
            "plan: --plan is carried out as it is; edit the file, or drop --lazy, --replicate, --exchange, --allow, "
            "--edge, --edge-back"
        )
    if plan is not None and plan.workers != workers:
        raise ValueError(
            f"--plan: the plan is for {plan.workers} workers, this job has {workers}; plan again, or pass --workers "
            f"{plan.workers}"
        )
    topology = None if asked.topology_file is None else read_topology(asked.topology_file)
    if topology is not None and planned is not None:
        topology = topology.of(planned)
    profile = None if asked.profile_file is None else read_profile(asked.profile_file)
    request = plan_request_of(asked, workers if topology is None else topology.workers)
    if plan is not None and any(request.of_steps.values()):
        raise ValueError("--plan is carried out as it is; edit its schedule, or drop --schedule")
    return JobRequest(request, plan, topology, profile, asked.autotune)


def refuse_unnamed(task: Workload, request: JobRequest) -> None:
    """By the names alone, before anything is run.

    Raises:
        ValueError: a pattern means no parameter of the model, or only frozen ones.
    """
    patterns = [*request.wanted.constraints, *request.wanted.lazy]
    if patterns:
        with torch.device("meta"):
            model = task.model()
        names_of(patterns, parameter_facts(model))
