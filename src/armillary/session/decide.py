"""Measures the job, profiles a model on real batches and plans its training: on rank 0, for everyone."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.facts.plan import Choice, Mean, Plan, model_fingerprint
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.constraints import Constraint
from armillary.planning.planner import SIMULTANEOUS
from armillary.planning.planner import plan as make_plan
from armillary.planning.pricing import Assumptions
from armillary.runtime.hybrid.row_update import leaves_untouched_rows
from armillary.runtime.measure import measure, workers_per_node
from armillary.runtime.transport import Transport
from armillary.runtime.watch.probe import Loss
from armillary.runtime.watch.profiler import profile
from armillary.session.events import Decided
from armillary.session.rank_zero import by_rank_zero
from armillary.session.workload import Batch, Workload

__all__ = ["Subject", "Wishes", "assumptions_of", "decide", "first_batches", "open_transport", "subject_of"]

PROFILED_STEPS = 2


@dataclass(frozen=True)
class Wishes:
    """What the user wants of the plan, whatever the prices say.

    Args of note:
        constraints: parameter name or pattern -> placement or exchange.
        lazy: patterns of tables of which only the rows with a gradient shall move (not exact).
        plan: take this one as it is. topology: take this one, measure nothing. profile: take this one, of the model.
        schedule, mean: of the plan to make.
    """

    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    lazy: tuple[str, ...] = ()
    plan: Plan | None = None
    topology: Topology | None = None
    profile: Profile | None = None
    schedule: Choice = SIMULTANEOUS
    mean: Mean = "workers"

    @property
    def is_cyclic(self) -> bool:
        """Whether the plan, given or to be made, has a schedule that owns the loop."""
        return (self.plan.schedule if self.plan is not None else self.schedule).name == "cyclic"


def open_transport() -> Transport:
    """A transport that knows how ranks are packed into nodes."""
    alone = Transport()
    per_node = workers_per_node(alone)
    if per_node == 1:
        return alone
    alone.close()
    return Transport(per_node)


@dataclass(frozen=True)
class Subject:
    """What is to be trained. draw: workers -> some batches, in the order of `profile`; only rank 0 draws."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    draw: Callable[[int], Iterable[Batch]]


def subject_of(workload: Workload, seed: int) -> Subject:
    """A new model of the workload, the same on every rank, with its optimizer."""
    torch.manual_seed(seed)
    model = workload.model()

    def draw(workers: int) -> list[Batch]:
        return first_batches(workload, workers, PROFILED_STEPS, seed)

    return Subject(model, workload.optimizer(model.parameters()), workload.loss, draw)


def decide(subject: Subject, wishes: Wishes) -> Decided:
    """Every rank must call it, and every rank gets what rank 0 decided.

    Raises:
        ValueError: a wish cannot be granted, or nothing fits.
    """
    transport = open_transport()
    topology = wishes.topology or measure(transport)

    def think() -> tuple[str, str]:
        workers, per_node = topology.workers, topology.workers_per_node
        found = wishes.profile or profile(
            subject.model, subject.draw(workers), subject.loss, workers=workers, workers_per_node=per_node
        )
        _refuse_other_model(found, subject.model)
        chosen = wishes.plan or make_plan(
            found,
            topology,
            constraints=wishes.constraints,
            lazy=wishes.lazy,
            mean=wishes.mean,
            assumptions=assumptions_of(subject.optimizer),
            schedule=wishes.schedule,
        )
        return found.to_json(), chosen.to_json()

    profile_json, plan_json = by_rank_zero(transport, think)
    transport.close()
    return Decided(Profile.from_json(profile_json), topology, Plan.from_json(plan_json))


def _refuse_other_model(found: Profile, model: nn.Module) -> None:
    mine = model_fingerprint(
        (name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
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


def assumptions_of(optimizer: Optimizer) -> Assumptions:
    """What the optimizer keeps per parameter and whether it moves rows without gradient, found by trying it out."""
    options = optimizer.param_groups[0]
    quiet = leaves_untouched_rows(optimizer, options)
    parameter, state = next(((p, state) for p, state in optimizer.state.items() if state), (None, {}))
    if parameter is None:
        parameter, state = _state_after_a_step(optimizer, options)
    slots = sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in state.values())
    return Assumptions(optimizer_slots=slots, moves_quiet_rows=not quiet)


def _state_after_a_step(optimizer: Optimizer, options: Mapping[str, Any]) -> tuple[Tensor, Mapping[str, Any]]:
    """Of a twin with one parameter; the optimizer itself is left alone."""
    matrix = nn.Parameter(torch.ones(4, 4))
    matrix.grad = torch.ones(4, 4)
    twin = copy.copy(optimizer)
    twin.param_groups, twin.state = [{**options, "params": [matrix]}], defaultdict(dict)
    twin.step()
    return matrix, twin.state[matrix]
