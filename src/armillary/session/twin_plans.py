"""The two plans that are trained side by side, for one model on one kind of machines: the exact one and its twin.

The exact one is planned by price under those constraints that are exact. The twin's honours all of them. Both are
played against a clock, which gives their seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.codecs.rows import RowCode
from armillary.exchanges.exchange import build_dense, build_row, row_exchanges
from armillary.planning.constraints import departs
from armillary.planning.planner import make_plan
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.plans.group import DEPARTURES
from armillary.plans.plan import Plan
from armillary.plans.registry import Choice
from armillary.plans.topology import Topology
from armillary.profiler.profiler import profile
from armillary.reference.replicas import SharedGroup
from armillary.reference.serial import Meanings
from armillary.schedules.registry import read
from armillary.session.plan_job import assumptions_of, model_to_plan
from armillary.session.simulate import PROFILED_WORKERS
from armillary.session.traffic_meter import way_of
from armillary.session.truth import departing
from armillary.session.twin_page import Sent, Side, Sides, Twin, knots
from armillary.session.workload import Workload

__all__ = ["AskedTraining", "Both", "Losses", "planned"]


class AskedTraining(NamedTuple):
    """How both are trained; the workers of the topology are simulated."""

    topology: Topology
    steps: int
    seeds: int
    request: PlanRequest

    def words(self) -> str:
        """By which one training is told from another; seeds are not, since each is a training of its own."""
        words = [f"{way}={pattern}" for pattern, way in self.request.constraints.items()]
        words += [f"allow {departure}" for departure in self.request.allow]
        words += [name for name, is_asked in self.request.of_steps.items() if is_asked]
        for name, asked in (("edge", self.request.edge), ("edge back", self.request.edge_back)):
            of_stages = (
                [("", asked)]
                if isinstance(asked, Choice | str)
                else [(f"={j}", one) for j, one in (asked or {}).items()]
            )
            words += [f"{name} {choice}{stage}" for stage, choice in of_stages]
        return f"{', '.join(words)}; {self.topology.workers} workers, {self.steps} steps"

    @property
    def batches(self) -> int:
        """Of a step, those of all workers."""
        return read(self.request.schedule, self.topology.workers).total(self.topology.workers)

    def refuse(self) -> None:
        """
        Raises:
            ValueError: nothing could be compared so.
        """
        if self.topology.workers < 2:
            raise ValueError("twin: with 1 worker nothing crosses, so both would be the same; want at least 2")
        for name, value in (("steps", self.steps), ("seeds", self.seeds)):
            if value < 1:
                raise ValueError(f"twin: want at least 1 of {name}, got {value}")
        if not (self.request.constraints or self.request.allow or self.request.edges):
            raise ValueError(
                "twin: nothing is asked to differ from the exact plan; name an exchange that does (--exchange "
                "'CHOICE=*', or constraints={'*': Choice.parse('CHOICE')}), code the edges of a pipeline (--edge, or "
                "edge=), or allow lossy exchanges (--allow lossy)"
            )


class Losses(NamedTuple):
    """Of one seed, held out, by knot; and what a worker's exchanges that depart sent in a step."""

    exact: tuple[float, ...]
    other: tuple[float, ...]
    departing_bytes: float


class Both(NamedTuple):
    """The two plans for the same machines, as sides without losses yet; and the twin's exchanges that depart.

    rows: by table of the twin whose rows are coded, what arrives of these. departing_bytes: of the exchanges, as
    forecast. departures: in what the twin is not exact. plans: where a schedule owns the loop, the exact one's and the
    twin's; else none. priced: the twin's side, if those exchanges send so many times the bytes that are forecast.
    """

    exact: Side
    other: Side
    departing: tuple[SharedGroup, ...]
    rows: Mapping[str, Meanings]
    departing_bytes: float
    departures: tuple[str, ...]
    priced: Callable[[float], Side]
    plans: tuple[Plan, ...] = ()

    def twin(self, subject: str, asked: AskedTraining, losses: Sequence[Losses], notes: Sequence[str] = ()) -> Twin:
        """With the losses of every seed. subject: in words, what was trained and how."""
        is_counted = bool(self.departing) and not self.plans
        sent = Sent(self.departing_bytes, fmean(one.departing_bytes for one in losses)) if is_counted else None
        exact, other = replace(self.exact, losses=tuple(one.exact for one in losses)), self.other
        if sent is not None and sent.forecast_bytes:
            other = self.priced(sent.counted_bytes / sent.forecast_bytes)
        other = replace(other, losses=tuple(one.other for one in losses))
        said = [f"{word}: {DEPARTURES[word]}" for word in self.departures]
        if self.rows:
            said.append(f"rows of {', '.join(self.rows)} are read in code; their bytes are forecast, not counted")
        if self.plans:
            schedule = self.plans[0].schedule.name
            said.append(f"both are trained under {schedule}, in one process; what is sent is forecast, not counted")
        return Twin(subject, asked.topology.workers, Sides(exact, other, knots(asked.steps)), sent, (*said, *notes))


def planned(workload: Workload, asked: AskedTraining) -> Both:
    """Profiles the model here, as a worker of one core, and plans and simulates both.

    Raises:
        ValueError: what is asked cannot be granted on this model and these machines.
    """
    seen, threads = min(asked.topology.workers, PROFILED_WORKERS), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        subject = model_to_plan(workload, seed=0)
        found = profile(subject.model, subject.draw(seen), subject.loss, workers=seen)
    finally:
        torch.set_num_threads(threads)
    case = Case(found, asked.topology, assumptions_of(subject.optimizer, subject.model))
    exactly = {pattern: way for pattern, way in asked.request.constraints.items() if not departs(way)}
    exact_request = replace(asked.request, constraints=exactly, allow=(), edge=None, edge_back=None)
    plans = tuple(make_plan(case, one) for one in (exact_request, asked.request))
    shared = tuple(_departing(plans[1]))
    named = {name for group in shared for name in group.parameters}
    nbytes = sum(group.forecast.sent_bytes for group in plans[1].groups if named & set(group.parameters))
    exact, other = (_side(one, case) for one in plans)
    kept = plans if plans[0].stages else ()
    pushed = [group.name for group in plans[1].groups if named & set(group.parameters)]

    def priced(times: float) -> Side:
        return _side(plans[1], case, dict.fromkeys(pushed, times))

    return Both(exact, other, shared, _coded_rows(plans[1]), nbytes, plans[1].departures, priced, kept)


def _side(plan: Plan, case: Case, pushed: Mapping[str, float] = MappingProxyType({})) -> Side:
    played, departs = simulate(plan, case, pushed=pushed), plan.departures
    ways = [way_of(plan, group) for group in plan.groups if group.departures or not departs]
    for stage in plan.stages:
        coded = (("edge", stage.edge), ("edge back", stage.edge_back))
        ways += [f"{name} {choice}" for name, choice in coded if choice is not None]
    return Side(", ".join(dict.fromkeys(ways)), played.step_seconds, sum(played.sent_bytes.values()))


def _departing(plan: Plan) -> list[SharedGroup]:
    return [
        SharedGroup(group.parameters, build_dense(choice.name, **choice.options)) for group, choice in departing(plan)
    ]


def _coded_rows(plan: Plan) -> dict[str, Meanings]:
    """By table: its rows and gradients are encoded and decoded, as on their way between ranks."""
    found = {}
    for group in plan.groups:
        if group.exchange is not None and group.exchange.name in row_exchanges():
            codes = build_row(group.exchange.name, **group.exchange.options).codes
            if codes.departs:
                found[group.parameters[0]] = Meanings(*(partial(_crossed, code) for code in codes))
    return found


def _crossed(code: RowCode, rows: Tensor) -> Tensor:
    return code.decode(code.encode(rows), rows)
