"""What was asked on the command line, turned into what the library takes: workloads, requests, and facts from files."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from armillary.cli.find import find, small
from armillary.cli.options import AskedPlan, AskedWorkload
from armillary.facts.choice import Choice
from armillary.facts.plan import SIMULTANEOUS, Plan
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.constraints import Constraint, names_of, refuse_unknown
from armillary.planning.edges import EdgeRequest
from armillary.planning.request import PlanRequest
from armillary.schedules.registry import read
from armillary.session.decide import JobRequest
from armillary.session.folder import read_kept
from armillary.session.watched import parameter_facts
from armillary.session.workload import Workload

__all__ = [
    "constraints_of",
    "edge_request",
    "job_request_of",
    "read_plan",
    "read_profile",
    "read_topology",
    "refuse_unnamed",
    "schedule_of",
    "workload_of",
]  # fmt: skip

STAGES = re.compile(r"(?P<choice>.*?)(=(?P<stages>\d+(,\d+)*))?", re.DOTALL)


def workload_of(asked: AskedWorkload) -> Workload:
    """
    Raises:
        ValueError: no such workload, or an option it refuses.
    """
    return find(asked.name, {**(small(asked.name) if asked.is_small else {}), **asked.settings})


def constraints_of(exchanges: Sequence[str], replicate: Sequence[str] = ()) -> dict[str, Constraint]:
    """What was typed as --exchange and --replicate.

    Raises:
        ValueError: one is not of the form that is wanted, or names no exchange.
    """
    constraints: dict[str, Constraint] = dict.fromkeys(replicate, "replicated")
    for text in exchanges:
        way, equals, pattern = text.rpartition("=")
        if not (way and equals and pattern):
            raise ValueError(f"--exchange: want CHOICE=PATTERN, as in owned_rows=emb.*, got {text!r}")
        choice = Choice.parse(way)
        constraints[pattern] = choice if choice.options else choice.name
    for pattern, constraint in constraints.items():
        refuse_unknown(pattern, constraint)
    return constraints


def job_request_of(asked: AskedPlan, workers: int) -> JobRequest:
    """
    Args:
        workers: of the job; a topology that is given says how many are planned for.

    Raises:
        ValueError: a file cannot be read, something is not of the form that is wanted, or two exclude one another.
    """
    constraints = constraints_of(asked.exchanges, asked.replicate)
    edge, edge_back = edge_request("--edge", asked.edges), edge_request("--edge-back", asked.edge_backs)
    plan = None if asked.plan_file is None else read_plan(asked.plan_file)
    if plan is not None and (constraints or asked.lazy or asked.allow or edge or edge_back):
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
    profile = None if asked.profile_file is None else read_profile(asked.profile_file)
    schedule = schedule_of(asked.schedule, workers if topology is None else topology.workers)
    if plan is not None and schedule != SIMULTANEOUS:
        raise ValueError("--plan is carried out as it is; edit its schedule, or drop --schedule")
    request = PlanRequest(
        constraints, asked.lazy, schedule=schedule, allow=asked.allow, rule=asked.rule, edge=edge, edge_back=edge_back
    )
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


def edge_request(option: str, texts: Sequence[str]) -> EdgeRequest:
    """What was typed of edges: one codec for all, or one for each of some stages.

    Raises:
        ValueError: a text that is no choice, or a stage twice.
    """
    found: dict[int, Choice] = {}
    for text in texts:
        read_text = STAGES.fullmatch(text)
        assert read_text is not None
        try:
            choice = Choice.parse(read_text["choice"])
        except ValueError as error:
            raise ValueError(f"{option}: {error}. Want CHOICE or CHOICE=STAGES, as in 'quantize(bits=8)=0,2'") from None
        if read_text["stages"] is None:
            if len(texts) > 1:
                raise ValueError(f"{option}: {choice} is for all stages; name the stages of each, as in {choice}=0")
            return choice
        for stage in map(int, read_text["stages"].split(",")):
            if stage in found:
                raise ValueError(f"{option}: stage {stage} has {found[stage]} and {choice}; want one")
            found[stage] = choice
    return found or None


def schedule_of(text: str, workers: int) -> Choice:
    """
    Raises:
        ValueError: it is no choice or no schedule, or its options do not go together on so many workers.
    """
    choice = Choice.parse(text)
    read(choice, workers)
    return choice


def read_plan(path: Path) -> Plan:
    """
    Raises:
        ValueError: the file cannot be read, or is no plan.
    """
    plan: Plan = read_kept(path, Plan, "plan")
    return plan


def read_topology(path: Path) -> Topology:
    """
    Raises:
        ValueError: the file cannot be read, or is no topology.
    """
    topology: Topology = read_kept(path, Topology, "topology")
    return topology


def read_profile(path: Path) -> Profile:
    """
    Raises:
        ValueError: the file cannot be read, or is no profile.
    """
    profile: Profile = read_kept(path, Profile, "profile")
    return profile
