"""Quicker ways to take the same steps: exact schedules that own the loop, priced, and taken or named in a note.

A pipeline or accumulation equals one process that takes the same micro-batches. So it may be taken by price only where
the user gave the micro-batches, or where it was tried that a batch is the mean of its parts (`Profile.splits`); and
only where the caller says that steps are taken by `run.step`. Otherwise it is one of the plan's other ways.

Prices are seconds for as much data as one worker's batch: a step of N workers has N of them, a pipeline's may differ.
`armillary advise` compares all ways; a plan names the quickest one.

`with_expected` says what a step is expected to take against a clock, and what plain all-reduce would take for the same
data; a plan that is slower than that says so.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from armillary.planning.candidates import Question, candidate, peak_bytes
from armillary.planning.constraints import PLAIN
from armillary.planning.grouping import groups, sizes
from armillary.planning.memory import needed_bytes
from armillary.planning.pricing import Case, dense_update_seconds
from armillary.planning.simulator import quickest, simulate
from armillary.planning.stage_plan import plan_staged
from armillary.plans.mesh import Mesh
from armillary.plans.plan import SIMULTANEOUS, Plan
from armillary.plans.profile import Profile
from armillary.plans.registry import Choice
from armillary.plans.units import bytes_text, seconds_text
from armillary.schedules.registry import SCHEDULES, options_of

__all__ = [
    "OTHER",
    "WORTH",
    "OtherWay",
    "StepWay",
    "all_reduce_seconds",
    "fitting",
    "may_cut",
    "quickest_loop",
    "step_seconds",
    "stepping",
    "with_expected",
    "with_quickest",
    "with_slower_said",
]

SLOWER = 1.02  # times: forecasts do not tell less apart


def with_expected(plan: Plan, case: Case) -> Plan:
    """The same plan with both; a step that no clock plays yet stays without.

    Args:
        case: what it was planned for. Under a schedule that owns the loop a batch of its profile is a micro-batch.
    """
    batches = options_of(plan).total(plan.workers) / plan.workers
    try:
        played = simulate(plan, case).step_seconds
    except ValueError:  # not lowered to instructions
        return plan
    return replace(plan, step_seconds=played, all_reduce_seconds=batches * all_reduce_seconds(plan, case))


def all_reduce_seconds(plan: Plan, case: Case) -> float:
    """A step that takes one batch a worker and sends every gradient whole, in buckets of the best size; whether it fits
    in memory or not."""
    return min(quickest(_all_reducing(plan, case), case).values())


def with_slower_said(plan: Plan, case: Case, is_constrained: bool) -> Plan:
    """The plan with the reason, if its step is expected to take longer than plain all-reduce.

    Args:
        plan: with what is expected. is_constrained: whether something in it is demanded.
    """
    mine, other = seconds_text(plan.step_seconds), seconds_text(plan.all_reduce_seconds)
    if plan.step_seconds <= SLOWER * plan.all_reduce_seconds or mine == other:
        return plan
    note = f"slower than all-reduce of everything ({mine}, not {other}): {_why_slower(plan, case, is_constrained)}"
    return replace(plan, notes=(*plan.notes, note))


def _why_slower(plan: Plan, case: Case, is_constrained: bool) -> str:
    needed = min(needed_bytes(one, case) for one in _all_reducing(plan, case))
    if needed > case.topology.memory_bytes:
        return f"that would not fit in memory, as it needs {bytes_text(needed)}"
    if is_constrained:
        return "constraints (--exchange, --replicate) ask for it"
    less = needed - needed_bytes(plan, case)
    if less > 0:
        return f"it needs {bytes_text(less)} less memory, and alone its exchanges are priced about as low"
    return "prices of exchanges hide nothing behind compute; autotune=4 (train --autotune 4) times both"


def _all_reducing(plan: Plan, case: Case) -> list[Plan]:
    """A plan for the same that sends every gradient whole, in buckets of every size."""
    found = []
    for limits in sizes(case.topology.backend):
        question = Question(case, {}, frozenset(), limits)
        ways = {fact.name: candidate(fact, PLAIN["replicated"], question) for fact in question.trained}
        buckets = groups(ways, dict.fromkeys(ways, ""), question)
        peak, mesh = peak_bytes(buckets, case), Mesh.of(data=plan.workers)
        plain = replace(plan, mesh=mesh, groups=buckets, schedule=SIMULTANEOUS, stages=(), activation_bytes=peak)
        found.append(replace(plain, consensus="same"))
    return found


OTHER = "quicker way: "


class OtherWay(NamedTuple):
    """Seconds of a step, now and by this way.

    Args of note:
        is_exact: what is not comes after what is, however quick. ask: how to ask for it.
    """

    name: str
    is_exact: bool
    now_seconds: float
    seconds: float
    ask: str

    @property
    def gain(self) -> float:
        return self.now_seconds / self.seconds

    def __str__(self) -> str:
        steps = f"simulated step {seconds_text(self.seconds)}, not {seconds_text(self.now_seconds)}"
        return f"{self.name}, {'exact' if self.is_exact else 'NOT exact'}, {steps}: {self.ask}"


def with_quickest(plan: Plan, ways: Iterable[OtherWay]) -> Plan:
    """The plan with a note on the exact way that gains most, and on the one that is not exact; without one where there
    is neither."""
    ordered = sorted(ways, key=lambda way: (not way.is_exact, -way.gain))
    best = {way.is_exact: way for way in reversed(ordered)}
    if not best:
        return plan
    said = "; or ".join(str(best[is_exact]) for is_exact in (True, False) if is_exact in best)
    return replace(plan, notes=(*plan.notes, f"{OTHER}{said}. armillary advise compares all methods"))


PARTS = (1, 2, 4)  # of a batch, where it may be cut
WORTH = 1.1  # a gain that is worth a note, and another way to step
HOW = "attach(plan, model, optimizer, loss=loss, example=batch), then run.step(micro_batches)"


@dataclass(frozen=True)
class StepWay:
    """A plan to be stepped by `run.step`. seconds: of as much data as one worker's batch, of which a step has so many
    `batches`."""

    plan: Plan
    seconds: float
    batches: float

    def told(self, case: Case) -> Plan:
        """The plan with what a step is expected to take."""
        plain = self.batches / case.topology.workers * all_reduce_seconds(self.plan, case)
        return replace(self.plan, step_seconds=self.batches * self.seconds, all_reduce_seconds=plain)


def quickest_loop(case: Case, micro_batches: int | None) -> StepWay | None:
    """The exact schedule that takes least and fits; None where there is none.

    Workers side by side are left out: they exchange what a loop of the user's own exchanges, and hide less of it.

    Args:
        micro_batches: of a step and data coordinate, as the user cuts them; None: parts of a batch may be tried.
    """
    ways = [way for way in fitting(case, micro_batches) if not options_of(way.plan).method.replicates_table]
    return min(ways, key=lambda way: way.seconds, default=None)


def fitting(case: Case, micro_batches: int | None) -> list[StepWay]:
    """Every exact schedule that owns the loop and fits, the quickest first."""
    ways = [way for way in _ways(case, micro_batches) if _held(way.plan) <= case.topology.memory_bytes]
    return sorted(ways, key=lambda way: way.seconds)


def stepping(plain: Plan, case: Case, micro_batches: int | None) -> Iterator[OtherWay]:
    """The exact schedule that owns the loop and is quickest, if it brings much. Seconds are those of one batch."""
    way, mine = quickest_loop(case, micro_batches), step_seconds(plain, case)
    if way is None or mine < WORTH * way.seconds:
        return
    splits, ask = case.profile.splits, f"{HOW} (train --schedule '{way.plan.schedule}')"
    if micro_batches is None and splits != "exact":
        why = "nobody tried whether a batch is the mean of its parts" if splits == "untried" else splits
        ask = f"not by price, as {why}; cut micro-batches yourself: {ask}"
    ask, each = f"equal to one process with the same micro-batches, {ask}", case.topology.workers
    yield OtherWay(f"schedule {way.plan.schedule}", True, each * mine, each * way.seconds, ask)


def step_seconds(plain: Plan, case: Case) -> float:
    """Of one worker's batch under a plan for the user's own loop: all workers take theirs at the same time."""
    return simulate(plain, case).step_seconds / case.topology.workers


def may_cut(case: Case, micro_batches: int | None) -> bool:
    """Whether an exact schedule may be taken by price."""
    return micro_batches is not None or case.profile.splits == "exact"


def _held(plan: Plan) -> float:
    forecast = plan.forecast
    return forecast.memory_bytes + forecast.peak_bytes


def _ways(case: Case, micro_batches: int | None) -> Iterator[StepWay]:
    workers = case.topology.workers
    for parts in PARTS if micro_batches is None else (1,):
        cut = replace(case, profile=_cut(case.profile, parts))
        for name, method in SCHEDULES.all().items():
            if not (method.is_cut and "micro_batches" in method.options.knows):
                continue
            each = micro_batches or (parts if method.replicates_table else parts * workers)
            if each == 1:  # nothing is cut
                continue
            try:
                plan = plan_staged(cut, Choice(name, {"micro_batches": each}))
            except ValueError:  # too few modules to cut between, or too few workers
                continue
            if plan.departures:
                continue
            batches = options_of(plan).total(workers) / parts
            glue = _outside_seconds(case.profile) / (workers if method.replicates_table else 1)
            update = dense_update_seconds(case.profile.parameter_bytes, case.profile.parameters, case)
            update /= 1 if method.replicates_table else workers
            yield StepWay(plan, (plan.forecast.seconds + update) / batches + glue, batches)


def _outside_seconds(profile: Profile) -> float:
    """Of a batch, what runs outside every stage: the loss, the glue; a schedule's own pace does not count it."""
    return sum(stage.forward_seconds + stage.backward_seconds for stage in profile.stages if not stage.name)


def _cut(profile: Profile, parts: int) -> Profile:
    """The same model on a part of each batch."""
    stages = [
        replace(
            stage,
            forward_flops=stage.forward_flops // parts,
            activation_bytes=stage.activation_bytes // parts,
            forward_seconds=stage.forward_seconds / parts,
            backward_seconds=stage.backward_seconds / parts,
            output_bytes=stage.output_bytes // parts,
            output_numbers=tuple(one._replace(numel=one.numel // parts) for one in stage.output_numbers),
        )
        for stage in profile.stages
    ]
    each = {name: getattr(profile, name) // parts for name in ("step_bytes", "whole_step_bytes")}
    return replace(profile, stages=tuple(stages), **each)
