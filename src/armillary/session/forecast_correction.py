"""Compute is timed again while the loop trains, and the forecast of a step is corrected by it.

The first steps are watched, operation by operation, on cold caches: what they take was up to five times what later ones
took. Later steps are timed from their outside alone: from the end of one to the end of the next, less the waits for
answers that a clock plays. So it is the loop's own pace, with its data, its optimizer, its buffers. Of every
stretch between two answers the slowest rank counts, since the others wait for it; of all steps the median, as an
evaluation between two of them is no part of either.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from armillary.planning.group_clock import LOOK_UPS
from armillary.planning.pricing import Case, assumptions_behind
from armillary.planning.simulator import simulate
from armillary.planning.step_time import with_expected
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology
from armillary.plans.units import seconds_text
from armillary.session.events import PlannedJob
from armillary.session.hooks_engine import UserLoop
from armillary.transport.scopes import Stretch

__all__ = ["FROM_STEP", "TO_STEP", "CorrectedFacts", "ForecastCorrection", "corrected_facts"]

FROM_STEP, TO_STEP = 10, 40
LEAST = 0.1  # of what a step takes without waits: so much is forward and backward at least


class CorrectedFacts(NamedTuple):
    """What a plan was made from, with the compute that was timed."""

    profile: Profile
    topology: Topology


def corrected_facts(plan: Plan, case: Case, own_seconds: float) -> CorrectedFacts:
    """Facts under which the processor of a played step has as much to do as was measured.

    Index work and the optimizer stay as they are priced, and compute gets the rest. What requests take of a processor
    that computes, to be called and to be carried, is in what was measured, so nothing is charged for it once more.

    Args:
        own_seconds: of a step, without waits.
    """
    requests = tuple(replace(one, beside_seconds=0.0) for one in case.topology.requests)
    topology = replace(case.topology, requests=requests, hidden_share=1.0)
    played, compute = simulate(plan, replace(case, topology=topology)), _compute_seconds(case.profile)
    wanted = max(LEAST * own_seconds, own_seconds - (played.processor_seconds - compute))
    factor = wanted / compute if compute else 0.0
    stages = tuple(
        replace(
            stage,
            forward_seconds=factor * stage.forward_seconds,
            backward_seconds=factor * stage.backward_seconds,
        )
        for stage in case.profile.stages
    )
    return CorrectedFacts(replace(case.profile, stages=stages), topology)


def _compute_seconds(profile: Profile) -> float:
    return sum(stage.forward_seconds + stage.backward_seconds for stage in profile.stages)


@dataclass(eq=False)
class ForecastCorrection:
    """Times steps `FROM_STEP` to `TO_STEP`, then corrects the plan's forecast, on every rank alike.

    first_seconds: what was forecast before; 0 where nothing was. steps: that the loop had taken before.
    kept: what is called with the corrected facts, on rank 0.
    """

    first_seconds: float
    steps: int
    kept: Callable[[PlannedJob], None] = lambda decided: None
    stretches: list[tuple[Stretch, ...]] = field(default_factory=list)  # of every step

    def before_step(self, leaves_one: bool) -> None:
        """Nothing."""

    def after_step(self, loop: UserLoop, is_complete: bool) -> "ForecastCorrection | None":
        if not is_complete:
            return self
        self.steps += 1
        timed = loop.transport.stretches
        if self.steps == FROM_STEP:
            timed.begin()
        elif self.steps > FROM_STEP:
            self.stretches.append(timed.take())
        if self.steps < TO_STEP:
            return self
        timed.end()
        with loop.transport.within("the timing of steps"), loop.transport.unrecorded():
            loop.serve("idle")
            everyones = loop.transport.share(self.stretches)
        played = {LOOK_UPS, *(group.name for group in loop.plan.groups), *loop.plan.parameters}
        self._correct(loop, median(_together(step, played) for step in zip(*everyones, strict=True)))
        return None

    def loaded(self, loop: UserLoop, saved_plan: Mapping[str, Any], name: str) -> "ForecastCorrection":
        return self

    def stop(self) -> None:
        """It hangs on nothing."""

    def _correct(self, loop: UserLoop, own_seconds: float) -> None:
        profile, topology = loop.job.profile, loop.job.topology
        if profile is None or topology is None:
            return
        plan = loop.plan
        facts = corrected_facts(plan, Case(profile, topology, assumptions_behind(plan)), own_seconds)
        case = Case(facts.profile, facts.topology, assumptions_behind(plan))
        loop.job = replace(loop.job, profile=facts.profile, topology=facts.topology)
        loop.plan = with_expected(replace(plan, compute_seconds=_compute_seconds(facts.profile)), case)
        if loop.rank == 0:
            print(_said(self.first_seconds, own_seconds, loop.plan.step_seconds))
            self.kept(PlannedJob(facts.profile, facts.topology, loop.plan))


def _together(stretches: Sequence[tuple[Stretch, ...]], played: Set[str]) -> float:
    """Seconds that ranks spend in a step of their own, if at every wait all wait for the slowest.

    Args:
        stretches: of every rank. played: labels of requests that a clock plays; waits for others belong to the step.
    """
    if len({tuple(one.label for one in mine) for mine in stretches}) > 1:  # some asked alone
        return max(sum(one.own_seconds for one in mine) for mine in stretches)
    found = 0.0
    for together in zip(*stretches, strict=True):
        found += max(one.own_seconds for one in together)
        if not played & {*together[0].label.split(" + ")}:
            found += min(one.waited_seconds for one in together)
    return found


def _said(first_seconds: float, own_seconds: float, step_seconds: float) -> str:
    before = f"; the first forecast, of watched steps, was {seconds_text(first_seconds)}" if first_seconds else ""
    return (
        f"armillary: a step is forecast to take {seconds_text(step_seconds)}, of it {seconds_text(own_seconds)} "
        f"without waits (timed in steps {FROM_STEP} to {TO_STEP}){before}"
    )
