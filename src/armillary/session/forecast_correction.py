"""Compute and waits are timed again while the loop trains, and the forecast of a step is corrected by both.

The first steps are watched, operation by operation, on cold caches: what they take was up to five times what later ones
took. Later steps are timed from their outside alone: from the end of one to the end of the next, less the waits for
answers that a clock plays. So it is the loop's own pace, with its data, its optimizer, its buffers. Of every
stretch between two answers the slowest rank counts, since the others wait for it; of all steps the median, as an
evaluation between two of them is no part of either.

Links are measured in a second before the first step, and a small message's latency came out up to 2.7 times as long in
one start as in another. So links are made slower or faster, all by one factor, until the played step waits as long as
the timed ones: what a step took, less what the slowest rank did in each stretch of it.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any, NamedTuple

from armillary.planning.group_clock import LOOK_UPS
from armillary.planning.pricing import Case, assumptions_behind
from armillary.planning.quicker_ways import with_expected
from armillary.planning.simulator import simulate
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Link, Topology
from armillary.plans.units import seconds_text
from armillary.session.events import PlannedJob
from armillary.session.hooks_engine import UserLoop
from armillary.transport.requests import Stretch

__all__ = ["FROM_STEP", "TO_STEP", "CorrectedFacts", "ForecastCorrection", "corrected_facts"]

FROM_STEP, TO_STEP = 10, 40
LEAST = 0.1  # of what a step takes without waits: so much is forward and backward at least
FELT = 0.05  # of the same: where both wait less, nothing is said of the links
SLOWEST = 3.0  # times: what waits may make of links that were measured
ROUNDS = 3  # until played waits are the timed ones; overlap makes them grow faster than the links


class CorrectedFacts(NamedTuple):
    """What a plan was made from, with the compute and the links that were timed."""

    profile: Profile
    topology: Topology


class TimedStep(NamedTuple):
    """own_seconds: without waits for requests that a clock plays. waited_seconds: for those; None where ranks asked
    for different ones."""

    own_seconds: float
    waited_seconds: float | None


def corrected_facts(plan: Plan, case: Case, timed: TimedStep) -> CorrectedFacts:
    """Facts under which a played step computes as long, and waits as long, as was measured.

    Index work and the optimizer stay as they are priced, and compute gets the rest. What requests take of a processor
    that computes, to be called and to be carried, is in what was measured, so nothing is charged for it once more.
    """
    requests = tuple(replace(one, beside_seconds=0.0) for one in case.topology.requests)
    topology = replace(case.topology, requests=requests, hidden_share=1.0)
    played, compute = simulate(plan, replace(case, topology=topology)), _compute_seconds(case.profile)
    wanted = max(LEAST * timed.own_seconds, timed.own_seconds - (played.processor_seconds - compute))
    factor = wanted / compute if compute else 0.0
    stages = tuple(
        replace(
            stage,
            forward_seconds=factor * stage.forward_seconds,
            backward_seconds=factor * stage.backward_seconds,
        )
        for stage in case.profile.stages
    )
    profile = replace(case.profile, stages=stages)
    return CorrectedFacts(profile, _waits_as_long(plan, replace(case, profile=profile, topology=topology), timed))


def _waits_as_long(plan: Plan, case: Case, timed: TimedStep) -> Topology:
    """Links under which the played step waits as long; as they are where it waits too little to tell."""
    if timed.waited_seconds is None:
        return case.topology
    factor = 1.0
    for _ in range(ROUNDS):
        waits = sum(simulate(plan, replace(case, topology=_slower(case.topology, factor))).exposed_seconds.values())
        if not waits or max(waits, timed.waited_seconds) < FELT * timed.own_seconds:  # hidden behind compute
            break
        factor = min(SLOWEST, max(1 / SLOWEST, factor * timed.waited_seconds / waits))
    return _slower(case.topology, factor)


def _slower(topology: Topology, factor: float) -> Topology:
    """Every message takes so many times as long."""

    def of(link: Link) -> Link:
        return Link(factor * link.latency_seconds, link.bytes_per_second / factor)

    requests = tuple(replace(one, link=of(one.link)) for one in topology.requests)
    return replace(topology, inside=of(topology.inside), between=of(topology.between), requests=requests)


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
        steps = [_together(step, played) for step in zip(*everyones, strict=True)]
        waited = [step.waited_seconds for step in steps if step.waited_seconds is not None]
        own_seconds = median(step.own_seconds for step in steps)
        self._correct(loop, TimedStep(own_seconds, median(waited) if len(waited) == len(steps) else None))
        return None

    def loaded(self, loop: UserLoop, saved_plan: Mapping[str, Any], name: str) -> "ForecastCorrection":
        return self

    def stop(self) -> None:
        """It hangs on nothing."""

    def _correct(self, loop: UserLoop, timed: TimedStep) -> None:
        profile, topology = loop.job.profile, loop.job.topology
        if profile is None or topology is None:
            return
        plan = loop.plan
        facts = corrected_facts(plan, Case(profile, topology, assumptions_behind(plan)), timed)
        case = Case(facts.profile, facts.topology, assumptions_behind(plan))
        loop.job = replace(loop.job, profile=facts.profile, topology=facts.topology)
        loop.plan = with_expected(replace(plan, compute_seconds=_compute_seconds(facts.profile)), case)
        if loop.rank == 0:
            print(_said(self.first_seconds, timed.own_seconds, loop.plan.step_seconds))
            self.kept(PlannedJob(facts.profile, facts.topology, loop.plan))


def _together(stretches: Sequence[tuple[Stretch, ...]], played: Set[str]) -> TimedStep:
    """A step that ranks take together, if at every wait all wait for the slowest.

    Args:
        stretches: of every rank. played: labels of requests that a clock plays; waits for others belong to the step.
    """
    if len({tuple(one.label for one in mine) for mine in stretches}) > 1:  # some asked alone
        return TimedStep(max(sum(one.own_seconds for one in mine) for mine in stretches), None)
    own = 0.0
    for together in zip(*stretches, strict=True):
        own += max(one.own_seconds for one in together)
        if not played & {*together[0].label.split(" + ")}:
            own += min(one.waited_seconds for one in together)
    whole = mean(sum(one.own_seconds + one.waited_seconds for one in mine) for mine in stretches)
    return TimedStep(own, max(0.0, whole - own))


def _said(first_seconds: float, own_seconds: float, step_seconds: float) -> str:
    before = f"; the first forecast, of watched steps, was {seconds_text(first_seconds)}" if first_seconds else ""
    return (
        f"armillary: a step is forecast to take {seconds_text(step_seconds)}, of it {seconds_text(own_seconds)} "
        f"without waits (timed in steps {FROM_STEP} to {TO_STEP}){before}"
    )
