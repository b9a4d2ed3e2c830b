"""The short way: measure, profile, plan and attach in one call, for a script that has its own loop; and its parts.

Planning draws from the script's random state and puts it back (`unmoved`). So dropout and shuffling draw what they
would have drawn without a plan.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from armillary.measuring.measure import measure_links, with_memory_budget
from armillary.planning.constraints import names_of, needs_rows, refuse_unknown
from armillary.planning.demand import PRICE, Constraint
from armillary.planning.request import NO_CONSTRAINTS, PlanRequest, named
from armillary.planning.stage_costs import EdgeRequest
from armillary.plans.plan import SIMULTANEOUS, Mean
from armillary.plans.profile import ParameterFact
from armillary.plans.registry import Choice, exact_keywords
from armillary.plans.topology import Topology, turn_bytes_on
from armillary.prefetch.batches import is_plain_loader
from armillary.profiler.loop_watch import LoopWatch
from armillary.profiler.probe import Loss
from armillary.session.asked_methods import WatchedBatch
from armillary.session.attach import attach, begin_run
from armillary.session.events import PlannedJob
from armillary.session.job import TrainJob
from armillary.session.plan_cache import BatchShapes, PlanCache, cache_key, hosts_of, joined, shapes_of
from armillary.session.plan_job import PROFILED_STEPS, JobRequest, ModelToPlan, assumptions_of, open_transport, plan_job
from armillary.session.run import Run
from armillary.session.validation import NOT_HELD, handed_in, refuse_other_models, refuse_unfit, unheld
from armillary.session.watched_steps import Keeping, WatchedSteps, blank_profile, parameter_facts, provisional_plan
from armillary.tables.optimizers import as_one
from armillary.transport.agreement import by_rank_zero
from armillary.transport.groups import Timeouts
from armillary.transport.transport import Transport

__all__ = ["auto_plan", "measure", "parallelize", "unmoved"]


@contextmanager
def unmoved(loader: Any = None) -> Iterator[None]:
    """Afterwards the generators of torch, numpy and Python are as they were, and those that a DataLoader was given.

    Args:
        loader: what is drawn from; an iterator cannot be put back.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    own = {id(one): (one, one.get_state()) for one in _generators(loader)}
    host, arrays, plain = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    on_device = {device: torch.cuda.get_rng_state(device) for device in devices}
    try:
        yield
    finally:
        torch.set_rng_state(host)
        for device, state in on_device.items():
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(arrays)
        random.setstate(plain)
        for generator, state in own.values():
            generator.set_state(state)


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Of a loader, and of the samplers in it."""
    while loader is not None:
        if isinstance(there := getattr(loader, "generator", None), torch.Generator):
            yield there
        sampler = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
        loader = sampler if sampler is not loader else None


def measure() -> Topology:
    """What this job runs on: nodes, links, and the memory that is free. Takes a second or two; every rank must call it,
    before the model is made: what is in memory by then is not counted as room for it."""
    transport = open_transport()
    topology = measure_links(transport)
    transport.close()
    return topology


@exact_keywords
def parallelize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    batches: Iterable[Any] | None = None,
    loss: Loss | None = None,
    *,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    lazy: Sequence[str] = (),
    mean: Mean = "workers",
    schedule: Choice | str = SIMULTANEOUS,
    stages: Sequence[str] = (),
    prefetch: bool | None = None,
    autotune: int = 0,
    steps_by_run: bool = False,
    micro_batches: int | None = None,
    allow: Sequence[str] = (),
    rule: str = PRICE,
    edge: EdgeRequest = None,
    edge_back: EdgeRequest = None,
    keep: str | Path | None = None,
    scaler: Any = None,
    report_after: float | None = 60.0,
    timeout: float = 600.0,
    check_order: bool = False,
    check_data: bool = True,
    check_finite: bool = False,
    broadcast_buffers: bool = True,
    process_group: Any = None,
) -> Run:
    """Plans for this job and carries the plan out; the training loop stays as it was. Every rank must call it.

    Without `batches` and `loss`, the first two optimizer steps of the loop are watched, under a provisional plan that
    is exact: everything is whole on every rank. Then all ranks plan, rank 0 prints the plan, and the run moves to it;
    the move computes nothing. `run.plan` is provisional until then. A checkpoint that `run.load` opens before brings
    its plan along, where it was saved on as many workers and nothing else is asked for here.

    With them, the plan is made before the first step, and nothing is trained on the batches. Models on the meta device,
    those that do not fit whole, schedules that own the loop and `autotune` need it.

    Args (more in `auto_plan`, and from scaler on in `attach`):
        model: an ordinary module on this rank. optimizer: over its parameters, or several, each parameter in one.
        batches, loss: as one worker sees them, and loss(model, batch) -> scalar tensor; both, or none.
        constraints: name, alias or glob pattern -> layout, or exchange, as text or as a `Choice`.
        lazy: names or patterns of tables whose rows without gradient may stay put (NOT exact).
        mean: over "workers", or over the "weights" that the loop declares by `run.weigh`.
        schedule, stages: by name, as in "ring(slack=1)"; paths of modules at which it may cut. With batches and loss.
        prefetch: whether look-ups of the next batches leave early in a loop over `run.batches`; None: by price.
        autotune, steps_by_run, micro_batches: how many of the best plans are timed here; steps are taken by `run.step`,
            so a schedule may be chosen by price; of a step, where the caller cuts them. All with batches and loss.
        allow: departures from exact among which price may choose: ("lossy",) or none.
        rule: "price", or "parallax": tables read by row go by their owners, the rest by all-reduce.
        edge, edge_back: codecs of what stages of a pipeline hand on and get back (NOT exact).
        keep: a folder for plan and measured links: a restart of the same job uses them, and measures nothing.
        scaler: the loop's GradScaler: ranks then agree on skipped steps.
        report_after, timeout: seconds of one wait until it is told who stands where, and until it is an error.
        check_order, check_data: compare across ranks every request before it is made (slow), and the first batches.
        check_finite: a gradient that is not finite ends the backward, and the error names rank and parameters.
        broadcast_buffers, process_group: rank 0's reach all ranks after every step; the ranks that train, None: all.

    Raises:
        ValueError: too few batches, a constraint that cannot be honoured, or a model or optimizer that does not fit.
        TypeError: an argument that there is not.
    """
    request = PlanRequest(
        constraints, lazy, mean, named(schedule), prefetch, steps_by_run, micro_batches, allow, rule, edge, edge_back
    )
    connecting = Connecting(Timeouts(report_after, timeout), check_order, process_group)
    job = TrainJob(
        model, as_one(optimizer), scaler=scaler, check_data=check_data, check_finite=check_finite,
        broadcast_buffers=broadcast_buffers,
    )  # fmt: skip
    if batches is None and loss is None:
        _refuse_stages(stages)
        return _watched(job, JobRequest(request, autotune=autotune), connecting, keep)
    if batches is None or loss is None:
        raise _half_given("loss", "batches") if batches is None else _half_given("batches", "loss")
    with unmoved(batches):
        subject = ModelToPlan(model, job.optimizer, loss, _drawn(batches), stages)
        asked = JobRequest(_over(request, batches), autotune=autotune)
        return _begun(job, subject, _decided(subject, asked, connecting, keep), connecting)


def _refuse_stages(stages: Sequence[str]) -> None:
    if stages:
        raise ValueError("parallelize: stages are cut by a plan that is made beforehand; give batches and loss")


def _half_given(there: str, lacking: str) -> ValueError:
    return ValueError(
        f"parallelize: {there} is given without {lacking}; give both to plan before the first step, or none to plan "
        "from the first two steps of the loop"
    )


class Connecting(NamedTuple):
    """How ranks are to be connected; as in `attach`."""

    timeouts: Timeouts
    check_order: bool
    process_group: Any


def _decided(subject: ModelToPlan, asked: JobRequest, connecting: Connecting, keep: str | Path | None) -> PlannedJob:
    """As before, where the folder holds that; else anew."""
    if keep is None:
        return plan_job(subject, asked, connecting.process_group, connecting.timeouts)
    transport = open_transport(connecting.process_group, connecting.timeouts)
    with transport.within("the measuring and planning"):
        refuse_unfit("plan", handed_in(subject.model, subject.optimizer), transport)
        refuse_other_models("plan", subject.model, transport)
        wanted = cache_key(subject.model, subject.optimizer, asked, hosts_of(transport))
        start, workers = PlanCache.found(Path(keep), wanted, transport), transport.place.workers
        batch = by_rank_zero(transport, lambda: joined([shapes_of(one) for one in subject.draw(workers)]))
    transport.close()
    rank = transport.place.rank
    decided = start.for_batch(batch, rank)
    if decided is None:
        decided = plan_job(subject, asked, connecting.process_group, connecting.timeouts)
        start.leave(decided, batch, rank)
    return decided


def _begun(job: TrainJob, subject: ModelToPlan, decided: PlannedJob, connecting: Connecting) -> Run:
    """Under a plan that was made before the first step."""
    timeouts, check_order, process_group = connecting
    return attach(
        decided.plan, subject.model, subject.optimizer, loss=subject.loss, example=next(iter(subject.draw(1))),
        topology=decided.topology, profile=decided.profile, scaler=job.scaler, report_after=timeouts.report_after,
        timeout=timeouts.timeout, check_order=check_order, check_data=job.check_data, check_finite=job.check_finite,
        broadcast_buffers=job.broadcast_buffers, process_group=process_group,
    )  # fmt: skip


@unmoved()
def _watched(job: TrainJob, request: JobRequest, connecting: Connecting, keep: str | Path | None) -> Run:
    """Under the provisional plan."""
    _refuse_unwatched(job.model, request)
    wanted = request.wanted

    def measured(transport: Transport) -> Topology:
        return with_memory_budget(job.model, job.optimizer, measure_links(transport), transport)

    start, topology = _known(job, request, connecting, keep, measured)
    seen = blank_profile(parameter_facts(job.model), topology)
    names_of([*wanted.constraints, *wanted.lazy], seen.parameters)
    _refuse_unheld(job, wanted.constraints, seen.parameters)
    plan = provisional_plan(seen, topology, wanted.mean, assumptions_of(job.optimizer, job.model))
    watch = LoopWatch(job.model)
    keeping = None if start is None else Keeping(start, BatchShapes(job.model))
    watcher = WatchedSteps(watch, wanted, topology, measured, WatchedBatch(job.model), keeping)
    timeouts, check_order, process_group = connecting
    transport = Transport(plan.workers_per_node, check_order, timeouts, turn_bytes_on(topology), process_group)
    try:
        run = begin_run(transport, plan, replace(job, watcher=watcher, topology=topology))
    except BaseException:
        watcher.stop()
        raise
    run._engine.first.only_plain = wanted.prefetch is None  # nobody asked to look ahead in others
    watch.begin()
    return run


def _known(
    job: TrainJob,
    request: JobRequest,
    connecting: Connecting,
    keep: str | Path | None,
    measured: Callable[[Transport], Topology],
) -> tuple[PlanCache | None, Topology]:
    """What an earlier start left; and the links, as it found them, else measured now."""
    timeouts, _, process_group = connecting
    start: PlanCache | None = None
    if keep is not None:
        alone = Transport(timeouts=timeouts, process_group=process_group)  # a restart need not know of nodes
        with alone.within("the measuring"):
            refuse_unfit("parallelize", handed_in(job.model, job.optimizer), alone)
            refuse_other_models("parallelize", job.model, alone)
            start = PlanCache.found(Path(keep), cache_key(job.model, job.optimizer, request, hosts_of(alone)), alone)
        alone.close()
        if start.decided is not None:
            return start, start.decided.topology
    alone = open_transport(process_group, timeouts)
    with alone.within("the measuring"):
        refuse_unfit("parallelize", handed_in(job.model, job.optimizer), alone)
        refuse_other_models("parallelize", job.model, alone)
        topology = measured(alone)
    alone.close()
    return start, topology


def _refuse_unheld(job: TrainJob, constraints: Mapping[str, Constraint], parameters: Sequence[ParameterFact]) -> None:
    """Rows that nobody would step are asked for. Others may be given to an optimizer later."""
    lacking = unheld(job.model, job.optimizer)
    for pattern, constraint in constraints.items():
        if needs_rows(constraint) and (meant := names_of([pattern], parameters)) <= {*lacking}:
            raise ValueError(
                f"parallelize: {', '.join(sorted(meant))} cannot be {constraint}, as {pattern!r} asks: {NOT_HELD}"
            )


def _refuse_unwatched(model: nn.Module, request: JobRequest) -> None:
    """What a loop's first steps cannot answer, and what they need not be waited for."""
    wanted = request.wanted
    for pattern, constraint in wanted.constraints.items():
        refuse_unknown(pattern, constraint)
    asked = {
        **wanted.of_steps,
        "autotune": request.autotune > 1,
        "a model on the meta device": any(one.is_meta for one in [*model.parameters(), *model.buffers()]),
    }
    if found := [what for what, is_asked in asked.items() if is_asked]:
        raise ValueError(
            f"parallelize: {' and '.join(found)} cannot wait for the first steps of the loop; give batches=... and "
            "loss=..., so that the plan is made before them"
        )


@exact_keywords
def auto_plan(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    batches: Iterable[Any],
    loss: Loss,
    *,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    lazy: Sequence[str] = (),
    mean: Mean = "workers",
    schedule: Choice | str = SIMULTANEOUS,
    stages: Sequence[str] = (),
    prefetch: bool | None = None,
    autotune: int = 0,
    steps_by_run: bool = False,
    micro_batches: int | None = None,
    allow: Sequence[str] = (),
    rule: str = PRICE,
    edge: EdgeRequest = None,
    edge_back: EdgeRequest = None,
) -> PlannedJob:
    """Measures this job, profiles the model and plans: `.topology`, `.profile` and `.plan`, the same on every rank, as
    `attach` wants them. Model and optimizer stay as they were. Every rank must call it. (What ranks
    measure and profile each for themselves differs, and so would their plans.)

    Args:
        batches: as one worker sees them; two a worker are drawn, one at least, and none is trained on. A loader does.
        loss: loss(model, batch) -> scalar tensor.
        stages: as in `parallelize`.
        constraints, lazy, mean, schedule, steps_by_run, micro_batches, allow, edge, edge_back: as in `plan`; under mean
            "weights" the loop declares them (`run.weigh`).
        prefetch: plan for a loop over `run.batches`, which is then some batches ahead of the training. The same
            training, bit for bit. None: by price where the batches are a DataLoader of torch's own, with a map-style
            dataset and a sampler of torch's; else the plan's notes say what it would bring, as with False.
        autotune: how many of the best plans are timed in this job, on copies of the model for a dozen steps each; the
            fastest is taken, and its notes hold the figures. Fewer than 2: none.
        rule: "price", or "parallax": tables that are only read by row go by their owners, the rest by all-reduce. How
            many owners a table has, Parallax's search finds over exchanges that are timed in this job; the notes hold
            the figures.

    Raises:
        ValueError: too few batches, or a constraint or schedule that cannot be honoured.
    """
    request = PlanRequest(
        constraints, lazy, mean, named(schedule), prefetch, steps_by_run, micro_batches, allow, rule, edge, edge_back
    )
    with unmoved(batches):
        subject = ModelToPlan(model, as_one(optimizer), loss, _drawn(batches), stages)
        return plan_job(subject, JobRequest(_over(request, batches), autotune=autotune))


def _over(request: PlanRequest, batches: Iterable[Any]) -> PlanRequest:
    """No prefetch by price over a loader that is not torch's own."""
    return request if request.prefetch is not None or is_plain_loader(batches) else replace(request, prefetch=False)


def _drawn(batches: Iterable[Any]) -> Callable[[int], list[Any]]:
    """As many as a profile for so many workers reads, each drawn once: the iterable may be endless."""
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"parallelize: batches is a {type(batches).__name__}, not batches; give a list or a loader, or call your "
            "generator function"
        )
    source, drawn = iter(batches), list[Any]()

    def draw(workers: int) -> list[Any]:
        drawn.extend(islice(source, max(0, PROFILED_STEPS * workers - len(drawn))))
        if not drawn:
            raise ValueError("parallelize: batches gave nothing; give a few, at least one per worker")
        return drawn

    return draw
