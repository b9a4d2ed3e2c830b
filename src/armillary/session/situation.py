"""What every method is told for `advise`: the profiled model, the machines, the plan by price, and prices of others."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from armillary.planning.clock import Simulation
from armillary.planning.memory import NothingFits, needed_bytes
from armillary.planning.planner import make_plan
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.plans.advice import PricedPlan, Situation
from armillary.plans.choice import Choice
from armillary.plans.group import Forecast
from armillary.plans.plan import SIMULTANEOUS, Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology
from armillary.profiler.forward_facts import forward_facts
from armillary.profiler.profiler import profile
from armillary.schedules.registry import SCHEDULES, options_of
from armillary.session.model_to_plan import ModelToPlan, assumptions_of
from armillary.stages.stages import refuse_uncut

__all__ = ["NO_LIMIT", "Typed", "played", "situation_of"]

NO_LIMIT = 1 << 62  # bytes
PROFILED_WORKERS = 8


@dataclass(frozen=True)
class Typed:
    """A workload as it was typed, and lines that make model, optimizer, batches and loss of it; empty in a script."""

    line: str = ""
    preamble: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Prices:
    """What any plan costs here; one that does not fit is priced as if there were room."""

    case: Case
    subject: ModelToPlan
    batches: list[Any]

    def __call__(self, schedule: Choice = SIMULTANEOUS, **asked: Any) -> PricedPlan:
        request = PlanRequest(schedule=schedule, **asked)
        try:
            made = make_plan(self.case, request)
        except NothingFits:
            roomy = replace(self.case, topology=replace(self.case.topology, memory_bytes=NO_LIMIT))
            made = make_plan(roomy, request)
        if (
            SCHEDULES[schedule.name].objectives.prepare is None
        ):  # else it changes the model before it cuts it, and says itself
            refuse_uncut(made, self.subject.model, self.subject.loss, self.batches[0])
        if len(made.stages) > 1 and len(set(map(_shapes, self.batches))) > 1:
            raise ValueError("batches differ in shape, and stages want micro-batches of one shape: pad them")
        return PricedPlan(made, self.forecast(made))

    def forecast(self, made: Plan) -> Forecast:
        """Of a step in which every rank takes one batch. A schedule's own step may have more of them, or fewer."""
        total, workers = made.forecast, made.workers
        share = workers / options_of(made).total(workers)
        held = needed_bytes(made, self.case)
        seconds = made.step_seconds or total.seconds
        return Forecast(share * total.sent_bytes, held - total.peak_bytes, share * seconds, total.peak_bytes)


def situation_of(
    subject: ModelToPlan,
    topology: Topology,
    found: Profile | None = None,
    *,
    typed: Typed = Typed(),
    is_stream: bool = False,
    measures: bool = False,
) -> Situation:
    """
    Args:
        found: the model's profile; None: it is made now.

    Raises:
        ValueError: there is no batch, or the model cannot be profiled.
    """
    batches = _drawn(subject, min(topology.workers, PROFILED_WORKERS))
    seen = min(len(batches), topology.workers, PROFILED_WORKERS)
    if found is None:
        model, loss = subject.model, subject.loss
        found = profile(model, batches, loss, workers=seen, stages=subject.stages)
    case = Case(found, topology, assumptions_of(subject.optimizer, subject.model))
    prices = _Prices(case, subject, batches)
    facts = forward_facts(subject.model, batches[0], subject.loss, is_stream)
    trained = [fact for fact in found.parameters if fact.requires_grad]
    bare = Situation(
        subject.model, subject.optimizer, subject.loss, batches, found, topology, facts, prices(), prices,
        optimizer_slots=case.slots_of(trained), typed=typed.line, preamble=typed.preamble, measures=measures,
    )  # fmt: skip
    return replace(bare, pipeline=_pipeline(bare))


def played(situation: Situation) -> Simulation:
    """A step of the plan by price against a clock."""
    return simulate(situation.chosen.plan, situation.price.case)  # type: ignore[attr-defined]


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(one.shape) for one in tree_leaves(batch) if isinstance(one, Tensor))


def _drawn(subject: ModelToPlan, workers: int) -> list[Any]:
    batches = list(subject.draw(workers))
    if not batches:
        raise ValueError("advise: batches gave none; give one at least")
    return batches


def _pipeline(situation: Situation) -> Choice | None:
    """The quickest exact schedule that cuts the model over all ranks."""
    found = [(made.forecast.seconds, schedule) for schedule, made in _cut(situation) if not made.plan.departures]
    return min(found, key=lambda one: one[0], default=(0.0, None))[1]


def _cut(situation: Situation) -> Iterator[tuple[Choice, PricedPlan]]:
    for name, method in SCHEDULES.all().items():
        if not method.is_cut or method.replicates_table or "micro_batches" not in method.options.knows:
            continue
        for count in situation.stage_counts:
            schedule = Choice(name, {"micro_batches": count, "stages": count})
            try:
                yield schedule, situation.price(schedule=schedule)
            except ValueError:
                continue
            break
