"""What was asked on the command line, turned into what the library takes: workloads and requests."""

import torch

from armillary.cli.asked import AskedPlan, AskedWorkload, read_plan, read_profile, read_topology
from armillary.cli.find import find, small
from armillary.facts.plan import SIMULTANEOUS
from armillary.planning.constraints import names_of, refuse_unknown
from armillary.planning.request import PlanRequest, named
from armillary.schedules.registry import read
from armillary.session.decide import JobRequest
from armillary.session.watched import parameter_facts
from armillary.session.workload import Workload

__all__ = ["job_request_of", "plan_request_of", "refuse_unnamed", "workload_of"]


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
        refuse_unknown(pattern, constraint)
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
    if plan is not None and asked.schedule != SIMULTANEOUS:
        raise ValueError("--plan is carried out as it is; edit its schedule, or drop --schedule")
    topology = None if asked.topology_file is None else read_topology(asked.topology_file)
    if topology is not None and planned is not None:
        topology = topology.of(planned)
    profile = None if asked.profile_file is None else read_profile(asked.profile_file)
    request = plan_request_of(asked, workers if topology is None else topology.workers)
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
