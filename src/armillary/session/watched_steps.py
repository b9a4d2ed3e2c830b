"""A loop's first steps are watched under a provisional plan; then all ranks plan at one optimizer step, and move.

Nobody knows yet how the model reads. So the provisional plan has everything whole on every worker, as in plain data
parallelism, but large tensors send only the rows that some worker touched: exact for any model.

The move computes nothing: values, optimizer state and gradients go where the plan wants them, bit for bit, over the
same connections. Where Parallax's rule is asked for, exchanges are timed at the move, to search the owners of tables.
"""

import json
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from armillary.exchanges.exchange import build_row, dense_exchanges, row_exchanges
from armillary.planning.constraints import LISTED, UNKNOWN, allows, coded_beside, names_of, resolve
from armillary.planning.demand import PRICE, Constraint
from armillary.planning.partition_search import OwnerSearch
from armillary.planning.planner import bucketings, make_plan
from armillary.planning.prefetch import prefetchable
from armillary.planning.pricing import Assumptions, Case
from armillary.planning.request import PlanRequest
from armillary.plans.plan import Mean, Plan
from armillary.plans.plan_text import number_of
from armillary.plans.profile import ParameterFact, Profile, StageFact
from armillary.plans.registry import Choice
from armillary.plans.topology import TURN_BYTES, Topology
from armillary.plans.units import bytes_text, enough_text
from armillary.profiler import profiler
from armillary.profiler.loop_watch import LoopWatch, Told
from armillary.profiler.profiler import watched_profile
from armillary.profiler.unfit_model import at_rest
from armillary.session.asked_methods import Given, WatchedBatch, naming_remedies, of_outputs
from armillary.session.events import PlannedJob
from armillary.session.forecast_correction import FROM_STEP, TO_STEP, ForecastCorrection
from armillary.session.hooks_engine import UserLoop
from armillary.session.hooks_state import units_of
from armillary.session.plan_cache import BatchShapes, PlanCache, Shapes, joined
from armillary.session.plan_job import ModelToPlan, assumptions_of, timed_owners
from armillary.session.plan_validation import OF_HOOKS, PlanQuestion, why_unfit
from armillary.session.undo import rollback_on_error
from armillary.session.validation import NOT_HELD, refuse_on_every_rank, unheld
from armillary.tables.handle import why_fixed
from armillary.tables.table import RowTable
from armillary.transport.agreement import by_rank_zero
from armillary.transport.transport import Transport

__all__ = [
    "WATCHED_STEPS",
    "Keeping",
    "WatchedSteps",
    "blank_profile",
    "is_provisional",
    "parameter_facts",
    "provisional_plan",
]

PROVISIONAL_NOTE = "provisional: the first steps of the loop are watched, then a plan is made of what they read"
REASON = "not known yet how it is read"


def blank_profile(parameters: Sequence[ParameterFact], topology: Topology) -> Profile:
    """Of a model of which only its parameters are known."""
    whole = StageFact("", 0, sum(fact.bytes for fact in parameters), 0, 0.0, 0.0)
    return Profile(tuple(parameters), (whole,), topology.workers, topology.workers, topology.workers_per_node)


def provisional_plan(seen: Profile, topology: Topology, mean: Mean, assumptions: Assumptions) -> Plan:
    """
    Args:
        seen: `blank_profile`. topology: its memory is all that a rank may hold, the model too.

    Raises:
        ValueError: whole gradients and optimizer state do not fit beside the model; it names what would.
    """
    trained = [fact for fact in seen.parameters if fact.requires_grad]
    large = [fact for fact in trained if len(fact.shape) > 1 and fact.bytes >= TURN_BYTES]
    wanted = {fact.name: UNKNOWN for fact in large if topology.workers > 1}
    wanted |= {fact.name: LISTED for fact in trained if assumptions.of(fact.name).lists_rows}
    roomy = replace(topology, memory_bytes=sys.maxsize)
    made = bucketings(Case(seen, roomy, assumptions), PlanRequest(wanted, mean=mean))[0]
    frozen = sum(fact.bytes for fact in seen.parameters) - sum(fact.bytes for fact in trained)
    held = made.forecast.memory_bytes
    if frozen + held > topology.memory_bytes:
        raise ValueError(_too_large(trained, large, frozen, held, topology))
    groups = tuple(replace(group, reason=REASON) for group in made.groups)
    return replace(made, groups=groups, notes=(PROVISIONAL_NOTE,), topology_fingerprint=topology.fingerprint)


def _too_large(
    trained: Sequence[ParameterFact], large: Sequence[ParameterFact], frozen: float, held: float, topology: Topology
) -> str:
    """What does not fit, and what would if the plan is made before the first step.

    Args:
        frozen, held: bytes of parameters that are not trained; of those that are, with gradients and optimizer state.
    """
    weights, ranks = sum(fact.bytes for fact in trained), topology.workers
    tables = held * sum(fact.bytes for fact in large) / weights
    names = ", ".join(fact.name for fact in large)
    ways = {
        f"row-wise sharding of {names}, if only rows of them are read": frozen + held - tables * (1 - 1 / ranks),
        "a pipeline by schedule=..., if the model divides evenly into a stage a rank": (frozen + held) / ranks,
    }
    fitting = [f"  {way}: {bytes_text(need)} a rank" for way, need in ways.items() if need <= topology.memory_bytes]
    said = (
        f"parallelize: the first steps would hold the whole model on every worker: {bytes_text(frozen + weights)} of "
        f"parameters, {bytes_text(held - weights)} of gradients and optimizer state; a rank has "
        f"{bytes_text(topology.memory_bytes)}"
    )
    if not fitting:
        return f"{said}; take more ranks, or ranks with {enough_text(frozen + held)} of memory"
    return (
        f"{said}. Before activations, these would do, if batches=... and loss=... are given, so that the plan is made "
        f"before the first step (armillary.advise compares all methods):\n" + "\n".join(fitting)
    )


def is_provisional(plan: Plan) -> bool:
    return PROVISIONAL_NOTE in plan.notes


WATCHED_STEPS = 2
NOTE = (
    f"made from {WATCHED_STEPS} watched steps of the loop, whose compute is slow: what a step takes is timed in steps "
    f"{FROM_STEP} to {TO_STEP} and said then, simulated steps above are too long, and the fullest moment too small; "
    "parallelize(model, optimizer, batches, loss) profiles all of it before the first step"
)

IN_VAIN = "gradients of {} travel in vain: no optimizer holds them; freeze them, or add them"
TAKEN = "the run goes on under the plan of the checkpoint, at once"
NOT_TAKEN = "the plan of the checkpoint is not gone on with: {}; the first steps are watched, and a plan is made anew"


class Keeping(NamedTuple):
    """What an earlier start left, and what this one's batches are."""

    start: PlanCache
    shapes: BatchShapes


@dataclass(eq=False)
class WatchedSteps:
    """Looks on until enough steps were taken, or a checkpoint brings a plan. measured: links anew, by every rank.
    keeping: where plans stay for the next start; one that is there is taken after the first step, if its batch is
    alike."""

    watch: LoopWatch
    request: PlanRequest
    topology: Topology
    measured: Callable[[Transport], Topology]
    last: WatchedBatch
    keeping: Keeping | None = None
    is_asked: bool = False  # whether the batch was held against the one that was kept

    def __post_init__(self) -> None:
        for end in (self.watch.end, self.last.end):
            weakref.finalize(self, end).atexit = False  # of a run that is dropped without a word

    def before_step(self, leaves_one: bool) -> None:
        self.watch.is_paused = True
        if leaves_one:
            self._take()

    def after_step(self, loop: UserLoop, is_complete: bool) -> "WatchedSteps | ForecastCorrection | None":
        self.watch.is_paused = False
        if not is_complete:  # gradients may wait for the others
            return self
        self._take()
        if self.keeping is not None and self.keeping.start.decided is not None and not self.is_asked:
            self.is_asked = True
            here = loop.transport.within("the return to a plan that was kept")
            with here, loop.transport.unrecorded():
                decided = self.keeping.start.for_batch(self._batch(loop), loop.rank)
                if decided is None:
                    self.topology = self.measured(loop.transport)
                    loop.job = replace(loop.job, topology=self.topology)
                    return self
                with self._released(loop):
                    _move(loop, decided.plan)
                loop.job = replace(loop.job, profile=decided.profile)
            if loop.rank == 0:
                print(loop.plan)
            return None if loop.plan.is_timed else self._correction(0.0, loop)
        if len(self.watch.steps) < WATCHED_STEPS:
            return self
        here, given = loop.transport.within("the planning after the first steps"), self.last.given
        with here, loop.transport.unrecorded(), self._released(loop):
            everyones = loop.transport.share(self._told(loop))
            case = partial(self._case, loop, everyones)
            timed = timed_owners(loop.transport, self.request, case)
            plan, seen = by_rank_zero(loop.transport, lambda: self._planned(loop, case(), timed, given))
            made = Plan.from_json(plan)
            loop.job = replace(loop.job, profile=Profile.from_json(seen))
            _move(loop, replace(made, compute_seconds=0.0, step_seconds=0.0, all_reduce_seconds=0.0))
        if loop.rank == 0:
            print(loop.plan)
        return self._correction(made.step_seconds, loop)

    def _batch(self, loop: UserLoop) -> Shapes:
        """Collective: what batches of all ranks have in common."""
        assert self.keeping is not None
        return joined(loop.transport.share(joined(self.keeping.shapes.seen)))

    def _correction(self, first_seconds: float, loop: UserLoop) -> ForecastCorrection:
        """With the plan kept, now and once its forecast is corrected."""
        if self.keeping is None:
            return ForecastCorrection(first_seconds, WATCHED_STEPS)
        start = self.keeping.start
        with loop.transport.unrecorded():
            batch = self._batch(loop)

        def leave(decided: PlannedJob) -> None:
            start.leave(decided, batch, loop.rank)

        assert loop.job.profile is not None
        leave(PlannedJob(loop.job.profile, self.topology, loop.plan))
        return ForecastCorrection(first_seconds, WATCHED_STEPS, leave)

    def _take(self) -> None:
        """The last steps are kept: before the first in which every optimizer steps there may be many."""
        self.watch.take()
        del self.watch.steps[:-WATCHED_STEPS]

    def loaded(
        self, loop: UserLoop, saved_plan: Mapping[str, Any], name: str
    ) -> "WatchedSteps | ForecastCorrection | None":
        """Moves the run to the plan of the checkpoint; rank 0 says so, or why not."""
        plan = Plan.from_json(json.dumps(saved_plan)) if saved_plan else None
        if plan is None or is_provisional(plan):
            return self
        why_not = self._why_unwanted(plan, loop) or self._why_unfit(plan, loop)
        if not why_not:
            with loop.transport.unrecorded(), self._released(loop):
                _move(loop, plan)
        if loop.rank == 0:
            print(f"load: {name}: {NOT_TAKEN.format(why_not) if why_not else TAKEN}")
        if why_not:
            return self
        return None if plan.is_timed else ForecastCorrection(0.0, 0)

    def stop(self) -> None:
        self.watch.end()
        self.last.end()
        if self.keeping is not None:
            self.keeping.shapes.end()

    @contextmanager
    def _released(self, loop: UserLoop) -> Iterator[None]:
        """Inside, nothing of ours hangs on the parameters; after an error the provisional plan is in force again."""
        self.stop()
        loop.executor.release()
        try:
            yield
        except BaseException:
            loop.begin(loop.plan, units_of(loop.plan, loop.job, loop.transport, loop.first))
            raise

    def _told(self, loop: UserLoop) -> Told:
        told, seen, lacking = self.watch.told(), {}, unheld(loop.model, loop.optimizer)
        for parameter, (name, *_) in profiler.names_of(loop.model).items():
            fixed, one = NOT_HELD if name in lacking else why_fixed(parameter), told.seen[name]
            seen[name] = replace(one, refusals=(*one.refusals, fixed)) if fixed else one
        return replace(told, seen=seen)

    def _case(self, loop: UserLoop, everyones: list[Told]) -> Case:
        found = watched_profile(loop.model, everyones, self.topology.workers_per_node)
        return Case(found, self.topology, assumptions_of(loop.optimizer, loop.model))

    def _planned(
        self, loop: UserLoop, case: Case, timed: Mapping[str, OwnerSearch], given: Given | None
    ) -> tuple[str, str]:
        """The plan and the profile behind it, as JSON, since they cross to the other ranks."""
        prefetch = self.request.prefetch if self.request.prefetch is not None or loop.first.is_plain else False
        with _naming_remedies(loop, case, given):
            made = make_plan(case, replace(self.request, prefetch=prefetch), timed)
        lacking = unheld(loop.model, loop.optimizer)
        vain = [IN_VAIN.format(", ".join(lacking))] if lacking else []
        return replace(made, notes=(*made.notes, NOTE, *vain)).to_json(), case.profile.to_json()

    def _why_unfit(self, plan: Plan, loop: UserLoop) -> str:
        """What speaks against it on any rank, our own hooks apart."""
        self.watch.is_paused = True
        self.watch.let_go()
        loop.executor.release()
        everyones = loop.transport.share(_why_unfit(plan, loop))
        self.watch.hang_on()
        loop.begin(loop.plan, units_of(loop.plan, loop.job, loop.transport, loop.first))
        self.watch.is_paused = False
        return next(filter(None, everyones), "")

    def _why_unwanted(self, plan: Plan, loop: UserLoop) -> str:
        """What is asked for here that this plan does not do; empty if it may be what the user would get."""
        request, nodes = self.request, self.topology
        if plan.schedule != request.schedule:
            return f"its schedule {plan.schedule.name} owns the loop"
        if (plan.workers, plan.workers_per_node) != (nodes.workers, nodes.workers_per_node):
            there, here = (
                f"{number_of(one.workers, 'worker')}, {one.workers_per_node} a node" for one in (plan, nodes)
            )
            return f"it is for {there}, and this job has {here}"
        if request.lazy or request.rule != PRICE or plan.mean != request.mean:
            return "lazy=, rule= or mean= ask for another here"
        if why_not := _why_other_prefetch(plan, request.prefetch):
            return why_not
        try:
            return _why_unasked(plan, request.allow, self._demands(plan, loop))
        except ValueError as error:  # planning anew will say so too, where nothing is half loaded
            return str(error)

    def _demands(self, plan: Plan, loop: UserLoop) -> Mapping[str, Constraint]:
        """What is demanded of each parameter here. Which tables can be spread, the checkpoint's profile knows."""
        asked, seen = self.request.constraints, loop.job.profile
        if seen is not None:
            by_row = {g.parameters[0] for g in plan.groups if g.exchange and g.exchange.name in row_exchanges()}
            beside = coded_beside(asked, seen.parameters) & by_row
            found = resolve(asked, seen, self.topology)
            return {name: one for name, one in found.items() if name not in beside}
        facts = parameter_facts(loop.model)
        patterns = sorted(asked, key=lambda pattern: pattern in loop.plan.parameters)  # a name outweighs a pattern
        return {name: asked[pattern] for pattern in patterns for name in names_of([pattern], facts)}


def _why_other_prefetch(plan: Plan, asked: bool | None) -> str:
    if plan.looks_ahead and asked is False:
        return "it prefetches, and prefetch=False is asked for here"
    return "it does not prefetch, and prefetch=True is asked for here" if asked and prefetchable(plan) else ""


def _why_unasked(plan: Plan, allow: Collection[str], demands: Mapping[str, Constraint]) -> str:
    """The first parameter that does not go as is demanded of it, or departs from exactness where that was not named."""
    for group in plan.groups:
        for name in group.parameters:
            constraint = demands.get(name)
            if not allows(constraint, group.own_exchange):
                return f"{name} goes by {group.own_exchange} there, and {str(constraint)!r} is asked for here"
            if missing := {*group.departures} - {*allow, *_permitted(constraint)}:
                return f"{name} goes by {group.own_exchange} there, which is {', '.join(sorted(missing))}; name it here"
    return ""


def _permitted(constraint: Constraint | None) -> Collection[str]:
    """The departures of what is named. Rows are in code only where that is spelt out."""
    if isinstance(constraint, Choice) and constraint.name in row_exchanges():
        return build_row(constraint.name, **constraint.options).codes.departs
    entry = dense_exchanges().get(constraint.name if isinstance(constraint, Choice) else constraint or "")
    return () if entry is None else entry.departs


@contextmanager
def _naming_remedies(loop: UserLoop, case: Case, given: Given | None) -> Iterator[None]:
    """Methods are tried on what went into the last forward."""
    batches = [] if given is None else [given] * loop.workers
    subject = ModelToPlan(loop.model, loop.optimizer, of_outputs, lambda workers: batches)
    with at_rest(loop.model), naming_remedies(subject, case.topology):
        yield


def _why_unfit(plan: Plan, loop: UserLoop) -> str:
    return why_unfit(OF_HOOKS, PlanQuestion(plan, loop.job, loop.transport))


def _move(loop: UserLoop, plan: Plan) -> None:
    """Collective, between two steps."""
    refuse_on_every_rank("parallelize", plan, _why_unfit(plan, loop), loop.transport, loop.job.options)
    by_row = [group.parameters[0] for group in plan.groups if group.own_exchange.name in row_exchanges()]
    parameters = dict(loop.model.named_parameters())
    gradients = {name: parameters[name].grad for name in by_row}  # a step leaves them until the loop drops them
    with rollback_on_error(loop.model, loop.optimizer):
        units = units_of(plan, loop.job, loop.transport, loop.first)
    for table in units.executor.tables:
        _show(table, gradients[table.name])
    loop.begin(plan, units)


def _show(table: RowTable, gradient: Tensor | None) -> None:
    """The gradient of the last step; that of a window does not outlive its step."""
    if gradient is None or table.has_window:
        return
    is_owner = table.place.rank in table.ownership.owners
    gradient = gradient.to_dense()  # of a watched step it may list its rows
    mine = table.ownership.ids(table.place.rank) if is_owner else torch.empty(0, dtype=torch.int64)
    table.show_gradient(gradient[mine] if table.is_pulled else gradient.clone())


def parameter_facts(model: nn.Module) -> list[ParameterFact]:
    """What is known of a model that nobody has run: gradients are taken to come against the model's order."""
    named = profiler.names_of(model)
    return [
        ParameterFact(
            name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), parameter.nbytes,
            parameter.requires_grad, "dense", aliases=tuple(aliases), arrival=len(named) - number,
        )
        for number, (parameter, (name, *aliases)) in enumerate(named.items())
    ]  # fmt: skip
