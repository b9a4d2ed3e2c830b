"""Measures the job, profiles a model on real batches and plans its training: on rank 0, for everyone.

A workload gets what its schedule wants besides, such as heads for stages that learn from losses of their own
(`prepared`).

How many workers own each table is found by timing its exchange in this job (`timed_owners`). Parallax relaunches the
whole job for every number of partitions it tries (EuroSys 2019, partitioning). Here a trial is a few look-ups and
pushes of as many distinct rows per rank as the profile counted. Rows are drawn evenly, so a trial does not know that
some are read more often than others.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import nn

from armillary.exchanges.exchange import RowExchange, build_row
from armillary.exchanges.look_up import LookupRequest, LookupTable, look_up
from armillary.exchanges.owned_rows import merge_rows
from armillary.measuring.measure import measure_links as measure
from armillary.measuring.measure import with_memory_budget, workers_per_node
from armillary.models.structure import passes_alike
from armillary.planning.demand import PRICE, refuse_with_rule
from armillary.planning.partition_search import OwnerSearch, SearchedTable
from armillary.planning.planner import make_plan, notes_on_hosts, tables_to_search, with_other_way
from armillary.planning.pricing import Case
from armillary.planning.quicker_ways import with_expected
from armillary.planning.request import PlanRequest
from armillary.plans.parcel import RankInfo
from armillary.plans.plan import Plan, Trainable, model_fingerprint
from armillary.plans.profile import Profile
from armillary.plans.registry import Choice
from armillary.plans.requests import Program
from armillary.plans.topology import Topology
from armillary.profiler.probe import profile_concurrently, rates_at_once
from armillary.profiler.profiler import profile
from armillary.profiler.unfit_model import makes_collectives
from armillary.schedules.method import Prepare, ScheduleOptions
from armillary.schedules.registry import options_of, read
from armillary.session.asked_methods import naming_remedies
from armillary.session.autotune import CHOSEN, alternatives, at_once, best, fastest, with_prefetch
from armillary.session.events import PlannedJob
from armillary.session.model_to_plan import ModelToPlan, assumptions_of
from armillary.session.plan_validation import joins_parameters, unserved
from armillary.session.validation import handed_in, refuse_other_models, refuse_unfit
from armillary.session.workload import Batch, Workload
from armillary.tables.optimizers import members
from armillary.transport.agreement import by_rank_zero
from armillary.transport.groups import DEFAULT_TIMEOUTS, Timeouts
from armillary.transport.transport import Transport

__all__ = [
    "JobRequest",
    "ModelToPlan",
    "assumptions_of",
    "first_batches",
    "model_to_plan",
    "open_transport",
    "plan_job",
    "prepared",
    "row_seconds",
    "timed_owners",
]

REPETITIONS = 5


def row_seconds(
    transport: Transport, exchange: RowExchange, rows: int, row_numel: int, dtype: torch.dtype, distinct: int
) -> float:
    """Median seconds of one look-up and its push on the slowest rank; every rank must call it and gets the same number.

    Args:
        rows, row_numel, dtype: of the table, on the CPU. distinct: rows one rank reads.
    """
    place = transport.place
    owned = exchange.ownership(rows, place)
    generator = torch.Generator().manual_seed(place.rank)
    drawn = torch.randint(rows, (max(1, distinct),), generator=generator)
    keys = owned.keys(drawn).unique()
    shard = torch.zeros(owned.shard_rows(place.rank), row_numel, dtype=dtype)
    table = LookupTable("trial", exchange, owned, shard)
    taken = []
    for _ in range(REPETITIONS + 1):
        transport.barrier()
        began = time.perf_counter()
        here, sums = transport.complete(_there_and_back(table, keys, place), "trial")
        shard.index_add_(0, *merge_rows(here, sums), alpha=-1.0)
        taken.append(time.perf_counter() - began)
    return transport.agree_largest([statistics.median(taken[1:])])[0]


def _there_and_back(table: LookupTable, keys: torch.Tensor, place: RankInfo) -> Program[Any]:
    outcome = yield from look_up(LookupRequest(0, keys, True, 0), [table], place)
    assert outcome.pulled is not None
    pulled = outcome.pulled
    return (yield from table.exchange.push([pulled.rows], [pulled.route], table.ownership, place))


def timed_owners(transport: Transport, request: PlanRequest, case: Callable[[], Case]) -> dict[str, OwnerSearch]:
    """The searches of the tables whose owners the rule searches, by table; none if the plan is for other machines.
    Every rank must call it, and all get the same.

    Args:
        case: asked on rank 0.

    Raises:
        ValueError: a constraint cannot be honoured.
    """

    def tables() -> tuple[SearchedTable, ...]:
        if request.rule == PRICE:
            return ()
        asked, place = case(), transport.place
        if (asked.topology.workers, asked.topology.workers_per_node) != (place.workers, place.workers_per_node):
            return ()
        return tables_to_search(asked, request)

    return {table.name: _timed(table, transport) for table in by_rank_zero(transport, tables)}


def _timed(table: SearchedTable, transport: Transport) -> OwnerSearch:
    def seconds(way: Choice) -> float:
        exchange = build_row(way.name, **way.options)
        dtype = getattr(torch, table.dtype)
        return row_seconds(transport, exchange, table.rows, table.row_numel, dtype, table.distinct_rows)

    return OwnerSearch(table, table.searched(seconds), is_timed=True)


PROFILED_STEPS = 2


@dataclass(frozen=True)
class JobRequest:
    """What the user wants of the planning in a job.

    Args of note:
        wanted: of the plan to make; what a rule searches is timed in this job.
        plan: take this one as it is. topology: take this one, measure nothing. profile: take this one, of the model.
        autotune: how many of the best plans are timed in this job, on copies of the model; fewer than 2 is none. A plan
            with a schedule that owns the loop is never timed.
        times_prefetch: whether plans that prefetch are among those timed, the loop being one over `run.batches` then.
    """

    wanted: PlanRequest = field(default_factory=PlanRequest)
    plan: Plan | None = None
    topology: Topology | None = None
    profile: Profile | None = None
    autotune: int = 0
    times_prefetch: bool = False

    def __post_init__(self) -> None:
        priced = {"a plan that is given (--plan)": self.plan is not None, "autotune (--autotune)": self.autotune > 1}
        refuse_with_rule(self.wanted.rule, priced)

    @property
    def schedule(self) -> Choice:
        """Of the plan, given or to be made."""
        return self.wanted.schedule if self.plan is None else self.plan.schedule


def open_transport(process_group: Any = None, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> Transport:
    """A transport that knows how ranks are packed into nodes; of these ranks, or of all."""
    alone = Transport(timeouts=timeouts, process_group=process_group)
    per_node = workers_per_node(alone)
    if per_node == 1:
        return alone
    alone.close()
    return Transport(per_node, timeouts=timeouts, process_group=process_group)


def model_to_plan(workload: Workload, seed: int) -> ModelToPlan:
    """A new model of the workload, the same on every rank, with its optimizer."""
    torch.manual_seed(seed)
    model = workload.model()

    def draw(workers: int) -> list[Batch]:
        return first_batches(workload, workers, PROFILED_STEPS, seed)

    return ModelToPlan(model, workload.optimizer(model.parameters()), workload.loss, draw)


def plan_job(
    subject: ModelToPlan, request: JobRequest, process_group: Any = None, timeouts: Timeouts = DEFAULT_TIMEOUTS
) -> PlannedJob:
    """Every rank must call it, and every rank gets what rank 0 decided.

    Raises:
        ValueError: what is asked cannot be granted, nothing fits, or ranks outside the group must pass as often.
    """
    if mark := passes_alike(subject.model):
        raise ValueError(f"plan: the model {mark}")
    transport = open_transport(process_group, timeouts)
    with transport.within("the measuring and planning"):
        refuse_unfit("plan", handed_in(subject.model, subject.optimizer), transport)
        refuse_other_models("plan", subject.model, transport)
        topology = request.topology or with_memory_budget(
            subject.model, subject.optimizer, measure(transport), transport
        )
        found = request.profile or _profiled(subject, topology, transport)
        if request.wanted.method.placement.deals_rows and not topology.rates and transport.place.workers > 1:
            own = partial(_own, subject, transport.place)
            rates = rates_at_once(found, subject.model, lambda: own()[0], subject.loss, transport)
            topology = replace(topology, rates=rates)

        def case() -> Case:
            return Case(found, topology, assumptions_of(subject.optimizer, subject.model))

        owners = timed_owners(transport, request.wanted, case)
        told = by_rank_zero(transport, partial(_planned, subject, found, topology, request, owners))
        plans = {name: Plan.from_json(text) for name, text in told.items()}
        chosen = next(iter(plans.values()))
        if len(plans) > 1:
            model, optimizer, loss = subject.model, subject.optimizer, subject.loss
            chosen = fastest(plans, model, optimizer, loss, _own(subject, transport.place), transport, topology)
    transport.close()
    return PlannedJob(found, topology, chosen)


def _planned(
    subject: ModelToPlan, found: Profile, topology: Topology, request: JobRequest, owners: Mapping[str, OwnerSearch]
) -> dict[str, str]:
    """The plan, or as many as are to be timed, best first, by name; as JSON, since they cross to the other ranks."""
    _refuse_other_model(found, subject.model)
    if request.plan is not None:
        return {CHOSEN: request.plan.to_json()}
    case, wanted = Case(found, topology, assumptions_of(subject.optimizer, subject.model)), request.wanted
    is_named = wanted.method.owns_loop
    if request.autotune < 2 or is_named:
        against = "" if is_named or not wanted.steps_by_run else _against_by_run(subject)
        is_by_run = wanted.steps_by_run and len(members(subject.optimizer)) == 1 and not against
        with naming_remedies(subject, topology, found):
            made = make_plan(case, replace(wanted, steps_by_run=is_by_run), owners)
        notes = [f"no schedule that owns the loop is taken by price, as {against}"] if against else []
        return {CHOSEN: replace(made, notes=(*made.notes, *notes)).to_json()}
    with naming_remedies(subject, topology, found):
        plans = alternatives(case, wanted)
    is_asked = request.times_prefetch or wanted.prefetch is True
    if is_asked or wanted.prefetch is None:  # unasked, no gradient waits
        plans = with_prefetch(plans, case, may_wait=is_asked)
    timed = at_once(best(plans, case, request.autotune), case)
    expected = {name: with_other_way(with_expected(plan, case), case, wanted) for name, plan in timed.items()}
    notes = notes_on_hosts(topology)
    return {name: replace(plan, notes=(*plan.notes, *notes)).to_json() for name, plan in expected.items()}


def _against_by_run(subject: ModelToPlan) -> str:
    """Why no schedule that owns the loop may be taken by price; empty if one may."""
    against = [*unserved(subject.model, subject.optimizer), *joins_parameters(subject.optimizer)]
    return next(iter(against), "")


def _profiled(subject: ModelToPlan, topology: Topology, transport: Transport) -> Profile:
    """What rank 0 sees of the model, with the stage times that the ranks of this job find together. All look at once
    where the model makes collectives of its own."""

    def look() -> str:
        batches = subject.draw(topology.workers)
        nodes = {"workers": topology.workers, "workers_per_node": topology.workers_per_node}
        return profile(subject.model, batches, subject.loss, **nodes, stages=subject.stages).to_json()

    def mine() -> Batch:
        return _own(subject, transport.place)[0]

    if transport.place.workers == 1:  # what is planned for are other machines
        return Profile.from_json(by_rank_zero(transport, look))
    if makes_collectives(subject.model, mine, subject.loss, transport):
        found = Profile.from_json(transport.share(look())[0])
    else:
        found = Profile.from_json(by_rank_zero(transport, look))
    return profile_concurrently(found, subject.model, mine, subject.loss, transport)


def _own(subject: ModelToPlan, place: RankInfo) -> list[Batch]:
    """The batches of this rank; one of another's, where there are fewer than ranks."""
    batches = list(subject.draw(place.workers))
    if not batches:
        raise ValueError("no batch to time a step with; give every rank at least one")
    return batches[place.rank :: place.workers] or [batches[place.rank % len(batches)]]


def _refuse_other_model(found: Profile, model: nn.Module) -> None:
    mine = model_fingerprint(
        Trainable(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )
    if mine != found.model_fingerprint:
        raise ValueError(
            f"plan: the profile is of model {found.model_fingerprint}, this is {mine}; measure again with this "
            "workload and the same options"
        )


def first_batches(workload: Workload, workers: int, steps: int, seed: int) -> list[Batch]:
    """What all workers draw in their first steps: step by step, worker by worker."""
    drawn = [list(islice(workload.batches("train", worker, workers, seed), steps)) for worker in range(workers)]
    if empty := [worker for worker, batches in enumerate(drawn) if not batches]:
        raise ValueError(
            f"{workload.name}: batches('train', worker, {workers}, seed) gives workers {empty} nothing; take fewer "
            "workers, a smaller batch_size or more data"
        )
    return [batch for together in zip(*drawn, strict=False) for batch in together]


def prepared(workload: Workload, request: JobRequest, workers: int) -> Workload:
    """The workload itself, unless the schedule of the request changes models.

    Args:
        workers: of the job, where the request names no machines.

    Raises:
        ValueError: options of the schedule that do not go together.
    """
    plan, workers = request.plan, workers if request.topology is None else request.topology.workers
    options = read(request.wanted.schedule, workers) if plan is None else options_of(plan)
    prepare = options.method.objectives.prepare
    return workload if prepare is None else cast(Workload, _Prepared(workload, options, prepare))


@dataclass(frozen=True)
class _Prepared:
    """All but the model is the workload's own."""

    workload: Workload
    options: ScheduleOptions
    prepare: Prepare

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.workload, name)

    def model(self) -> nn.Module:
        """Heads draw their first values behind the model's."""
        with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
            model = self.workload.model()
            with torch.random.fork_rng():
                batch = next(iter(self.workload.batches("train", 0, 1, 0)))
            return self.prepare(self.options, model, self.workload.loss, batch)
