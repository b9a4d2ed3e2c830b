"""What one process makes of a workload: the truth that a plan is held to, chosen by the plan's departures.

A plan that departs from nothing is held to `reference/serial`, which knows no exchange. One whose exchanges depart is
held to what they say of themselves: replicas in one process, joined by the exchanges' oracles.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from armillary.exchanges.exchange import build_dense, build_row, dense_exchanges, row_exchanges
from armillary.facts.plan import Choice, Group, Plan
from armillary.reference.replicas import Replicas, SharedGroup
from armillary.reference.rows import Meanings
from armillary.reference.serial import train_step
from armillary.schedules.random_stream import seed_streams
from armillary.session.feed import Feed, stream_seed
from armillary.session.workload import Batch, Workload

__all__ = [
    "ROUNDING", "SeededBatch", "Truth", "coded_rows", "departing", "departs", "one_process", "replicas", "seeded_loss",
]  # fmt: skip

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
        _note_norms(model, norms)
    return Truth((_values(model),), _quiet(norms, model))


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
            _note_norms(model, norms)
    return Truth(tuple(map(_values, found.models)), _quiet(norms, found.models[0]))


class SeededBatch(NamedTuple):
    """seed: of the random stream that its forward draws from."""

    seed: int
    batch: Batch


def seeded_loss(workload: Workload, model: nn.Module, seeded: SeededBatch) -> Tensor:
    seed_streams(seeded.seed, next(model.parameters()).device)
    return workload.loss(model, seeded.batch)


def _batches(workload: Workload, workers: int, steps: int, seed: int) -> Sequence[list[SeededBatch]]:
    """By step and worker, each with the seed of its random stream."""
    feeds = [Feed(workload, (worker, workers), seed) for worker in range(workers)]
    return [
        [SeededBatch(stream_seed(seed, step, worker), next(feed)) for worker, feed in enumerate(feeds)]
        for step in range(steps)
    ]


def _note_norms(model: nn.Module, norms: dict[str, float]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            norms[name] = max(norms.get(name, 0.0), float(parameter.grad.norm()))


def _quiet(norms: dict[str, float], model: nn.Module) -> frozenset[str]:
    limit = ROUNDING * max(norms.values(), default=0.0)
    return frozenset(name for name, _ in model.named_parameters() if norms.get(name, 0.0) <= limit)


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
