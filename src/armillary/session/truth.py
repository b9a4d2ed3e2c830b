"""What one process makes of a workload: the truth that a plan is compared with, chosen by the plan's departures.

| the plan | its truth |
| --- | --- |
| is exact | the user's own `loss(model, batch)`, whole (`reference/serial.py`, `reference/whole_model.py`) |
| has exchanges that depart | replicas in one process, joined by the exchanges' oracles |
| means something at its cuts only | loops over stages |

Weights of several ages, coded edges, losses of a stage's own and random numbers of a stage exist at cuts only. `verify`
uses loops over stages once these were seen to be the whole model. `twin` trains them, since edges are coded there as
codecs mean it. None of them knows the runtime.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_dense, build_row, dense_exchanges, row_exchanges
from armillary.plans.group import Group
from armillary.plans.plan import Plan
from armillary.plans.registry import Choice
from armillary.reference.edges import Edges
from armillary.reference.replicas import Replicas, SharedGroup
from armillary.reference.serial import Crossing, Meanings, train_step
from armillary.reference.versions import Reference, WorkersReference
from armillary.reference.whole_model import CutModel, Loss, WholeModel
from armillary.schedules.edges import codes_of
from armillary.schedules.random_streams import seed_streams
from armillary.schedules.registry import options_of
from armillary.session.workload import Batch, TrainBatches, Workload, stream_seed

__all__ = [
    "ROUNDING",
    "ScheduleTruth",
    "SeededBatch",
    "Truth",
    "WholeTruth",
    "coded_rows",
    "departing",
    "departs",
    "is_whole",
    "note_norms",
    "one_process",
    "quiet_of",
    "replicas",
    "seeded_loss",
]

ROUNDING = 1e-12  # a gradient this small beside the largest one is zero but for rounding


class Truth(NamedTuple):
    """values: parameters by name, of every worker; one for all where they are alike. quiet: parameters that only
    rounding moved."""

    values: tuple[dict[str, Tensor], ...]
    quiet: frozenset[str]

    def of(self, worker: int) -> dict[str, Tensor]:
        return self.values[worker % len(self.values)]


def departs(plan: Plan) -> bool:
    """Whether some group's exchange is not exact."""
    return bool(departing(plan)) or bool(coded_rows(plan))


def departing(plan: Plan) -> list[tuple[Group, Choice]]:
    """The groups whose exchange is not exact, and that exchange."""
    entries = dense_exchanges()
    pairs = [(group, group.exchange) for group in plan.groups if group.exchange is not None]
    return [(group, choice) for group, choice in pairs if choice.name in entries and entries[choice.name].departs]


def coded_rows(plan: Plan) -> dict[str, Meanings]:
    """By table whose rows or gradients are coded, what that means."""
    found, ways = {}, row_exchanges()
    for group in plan.groups:
        if group.exchange is not None and group.exchange.name in ways:
            codes = build_row(group.exchange.name, **group.exchange.options).codes
            if codes.departs:
                found[group.parameters[0]] = Meanings(codes.rows.meaning, codes.gradients.meaning)
    return found


def one_process(workload: Workload, workers: int, steps: int, seed: int) -> Truth:
    """The truth of exact plans, and which gradients were zero but for rounding at every step."""
    torch.manual_seed(seed)
    model = workload.model()
    optimizer, norms = workload.optimizer(model.parameters()), dict[str, float]()
    for batches in _batches(workload, workers, steps, seed):
        train_step(model, optimizer, batches, lambda net, seeded: seeded_loss(workload, net, seeded))
        note_norms(model, norms)
    return Truth((_values(model),), quiet_of(norms, model))


def replicas(workload: Workload, plan: Plan, steps: int, seed: int) -> Truth:
    """The truth of a plan whose exchanges depart: what they say of themselves."""
    torch.manual_seed(seed)
    entries, norms = dense_exchanges(), dict[str, float]()
    groups = [
        SharedGroup(group.parameters, build_dense(group.own_exchange.name, **group.own_exchange.options))
        for group in plan.groups
        if group.own_exchange.name in entries
    ]
    found = Replicas(
        workload.model(), lambda model: workload.optimizer(model.parameters()), plan.workers, groups,
        rows=coded_rows(plan), workers_per_node=plan.workers_per_node,
    )  # fmt: skip
    for batches in _batches(workload, plan.workers, steps, seed):
        found.step(batches, lambda net, seeded: seeded_loss(workload, net, seeded))
        for model in found.models:
            note_norms(model, norms)
    return Truth(tuple(map(_values, found.models)), quiet_of(norms, found.models[0]))


class SeededBatch(NamedTuple):
    """seed: of the random stream that its forward draws from."""

    seed: int
    batch: Batch


def seeded_loss(workload: Workload, model: nn.Module, seeded: SeededBatch) -> Tensor:
    seed_streams(seeded.seed, next(model.parameters()).device)
    return workload.loss(model, seeded.batch)


def _batches(workload: Workload, workers: int, steps: int, seed: int) -> Sequence[list[SeededBatch]]:
    """By step and worker, each with the seed of its random stream."""
    feeds = [TrainBatches(workload, (worker, workers), seed) for worker in range(workers)]
    return [
        [SeededBatch(stream_seed(seed, step, worker), next(feed)) for worker, feed in enumerate(feeds)]
        for step in range(steps)
    ]


def note_norms(model: nn.Module, norms: dict[str, float]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            norms[name] = max(norms.get(name, 0.0), float(parameter.grad.norm()))


def quiet_of(norms: dict[str, float], model: nn.Module) -> frozenset[str]:
    limit = ROUNDING * max(norms.values(), default=0.0)
    return frozenset(name for name, _ in model.named_parameters() if norms.get(name, 0.0) <= limit)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class ScheduleTruth:
    """
    Args:
        plan: of the model, under a schedule that owns the loop.
        model: it is trained in place, by `optimizer`, which is over its parameters.
        cut: the model, where the plan cuts it.
        seed: of all that is drawn.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, cut: CutModel, seed: int) -> None:
        self.model, self.options, self._cut = model, options_of(plan), cut
        self.edges = Edges(codes_of(self.options.edges), seed, self.options.stages)
        self._reference = self._made(plan, optimizer, seed)

    def _made(self, plan: Plan, optimizer: Optimizer, seed: int) -> Reference | WorkersReference:
        options, (stages, loss, _) = self.options, self._cut
        workers = options.replicas(plan.workers)
        if workers > 1:
            side_by_side = WorkersReference(stages, optimizer, options.schedule(), loss, seed, options.clip)
            side_by_side.crossings = _crossings(plan, dict(self.model.named_parameters()), workers)
            side_by_side.edges = self.edges
            side_by_side.objectives = options.method.objectives.of(options)
            return side_by_side
        own = range(options.micro_batches) if options.method.keeps_own_statistics else None
        reference = Reference(stages, optimizer, options.schedule(), loss, seed, own, options.clip)
        reference.edges = self.edges
        reference.corrections = options.built_corrections()
        reference.objectives = options.method.objectives.of(options)
        return reference

    def step(self, batches: Sequence[Batch]) -> None:
        """One training step. batches: its micro-batches, those of all processes, in their order."""
        given = [(self._cut.input_of(batch), batch) for batch in batches]
        if isinstance(self._reference, WorkersReference):
            count = self._reference.schedule.micro_batches
            self._reference.step([given[first : first + count] for first in range(0, len(given), count)])
        else:
            self._reference.step(given)

    def drain(self) -> None:
        """Everything before the next step has finished."""
        self._reference.drain()

    def own_buffers(self) -> list[dict[str, Tensor]]:
        """By process, its buffers by the model's names; empty where the model's own are all there are."""
        names = {id(buffer): name for name, buffer in self.model.named_buffers()}
        found = []
        for own in self._reference.buffers:
            theirs: dict[str, Tensor] = {}
            for stage, buffers in zip(self._reference.stages, own, strict=True):
                local = dict(stage.named_buffers())
                theirs |= {names[id(local[n])]: buffer for n, buffer in buffers.items() if id(local[n]) in names}
            found.append(theirs)
        return found


def _crossings(plan: Plan, named: Mapping[str, nn.Parameter], workers: int) -> list[Crossing]:
    """Of the groups whose exchange is not exact."""
    found = []
    for group, choice in departing(plan):
        members = [named[name] for name in group.parameters]
        found.append(Crossing(group.parameters, members, build_dense(choice.name, **choice.options), workers))
    return found


def is_whole(plan: Plan, draws: bool) -> bool:
    """Whether the whole model says all that a plan means; else part of it exists at the cuts only.

    Args:
        draws: whether a forward draws random numbers. A schedule seeds them stage by stage.
    """
    options = options_of(plan)
    at_cuts = options.edges or options.schedule().stale_share or options.schedule().uncoupled
    return not (draws or at_cuts or plan.departures)


class WholeTruth:
    """
    Args:
        plan: of the model, exact. model: it is trained in place, by `optimizer`, which is over its parameters.
        loss: of the whole model.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        options, named = options_of(plan), dict(model.named_parameters())
        stages = [
            [named[n] for one in plan.groups if one.stage == j for n in one.parameters] for j in range(options.stages)
        ]
        self._replicas = options.replicas(plan.workers)
        self._whole = WholeModel(model, optimizer, loss, self._replicas, stages, options.clip)
        self.drain = self._whole.drain

    def step(self, batches: Sequence[Batch]) -> None:
        """One training step. batches: its micro-batches, those of all processes, in their order."""
        each = len(batches) // self._replicas
        self._whole.step([batches[first : first + each] for first in range(0, len(batches), each)])

    def own_buffers(self) -> list[dict[str, Tensor]]:
        """By replica; empty where the model's own are all there are."""
        return self._whole.buffers if self._replicas > 1 else []
