"""A workload in float64 on MKL's reproducible mode, under plans that force one exchange: what `verify` compares.

In float64 rounding cannot hide a fault. Without MKL's reproducible mode a product of the same values may round
differently at another address: 73 of 120 matrix-vector products did (torch 2.13, AVX-512), and none with it. More
threads still sum in another order, so both sides of a comparison need as many.

Source: Intel oneMKL Developer Guide, Obtaining Numerically Reproducible Results.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_row, consensus_of, dense_exchanges, row_exchanges
from armillary.models.structure import mapped
from armillary.planning.constraints import PLAIN
from armillary.planning.grouping import dense_group
from armillary.plans.group import Group, Layout
from armillary.plans.mesh import Mesh
from armillary.plans.plan import Plan
from armillary.plans.profile import ParameterFact, Profile
from armillary.plans.registry import Choice
from armillary.session.workload import Batch, Workload

__all__ = ["InDouble", "ask_for_repeatable", "doubled", "is_repeatable", "uniform_plan"]

VARIABLE, MODE = "MKL_CBWR", "COMPATIBLE"


def ask_for_repeatable() -> None:
    """For this process, if it has made no product yet, and for those that it launches; what the user set stays."""
    os.environ.setdefault(VARIABLE, MODE)


def is_repeatable() -> bool:
    """Whether this process was asked to, or torch is built without MKL, so that there is nothing to ask."""
    return not torch.backends.mkl.is_available() or os.environ.get(VARIABLE, "") not in ("", "OFF")


def uniform_plan(profile: Profile, exchange: Choice, workers_per_node: int = 1) -> Plan:
    """Every trained parameter by `exchange`; by all_reduce where a row exchange meets one that is not read by row.

    Raises:
        ValueError: no such exchange; the message lists those that exist.
    """
    trained = [fact for fact in profile.parameters if fact.requires_grad]
    known = {**dense_exchanges(), **row_exchanges()}
    if exchange.name not in known:
        raise ValueError(f"plan: no exchange {exchange.name!r}; there are {', '.join(sorted(known))}")
    by_row = [fact for fact in trained if fact.shardable] if exchange.name in row_exchanges() else []
    rest = [fact for fact in trained if fact not in by_row]
    dense = exchange if exchange.name in dense_exchanges() else PLAIN["replicated"]
    groups = [_table(fact, exchange) for fact in by_row]
    for dtype, members in _by_dtype(rest).items():
        names = tuple(fact.name for fact in members)
        groups.append(dense_group(f"dense {dtype}", names, dense, reason="asked for"))
    arrival = {fact.name: math.inf if fact.arrival is None else fact.arrival for fact in trained}
    groups.sort(key=lambda group: max(arrival[name] for name in group.parameters))
    return Plan(
        Mesh.of(data=profile.workers),
        tuple(groups),
        profile.model_fingerprint,
        workers_per_node=workers_per_node,
        consensus=consensus_of(groups),
    )


def _table(fact: ParameterFact, exchange: Choice) -> Group:
    layout: Layout = "replicated"
    built = build_row(exchange.name, **exchange.options)
    if built.placement == "row_sharded":
        layout = "row_sharded"
    return Group(fact.name, (fact.name,), layout, exchange, departures=built.codes.departs, reason="asked for")


def _by_dtype(facts: Iterable[ParameterFact]) -> dict[str, list[ParameterFact]]:
    """A bucket holds one dtype."""
    found: dict[str, list[ParameterFact]] = defaultdict(list)
    for fact in facts:
        found[fact.dtype].append(fact)
    return found


@dataclass(frozen=True)
class InDouble:
    """The same workload with parameters, buffers and real-valued batches in float64."""

    workload: Workload

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def unit(self) -> str:
        return self.workload.unit

    @property
    def steps(self) -> int:
        return self.workload.steps

    @property
    def batch_size(self) -> int:
        return self.workload.batch_size

    def model(self) -> nn.Module:
        return self.workload.model().double()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return self.workload.optimizer(parameters)

    def batches(self, split: str, worker: int, workers: int, seed: int) -> Iterator[Batch]:
        return map(doubled, self.workload.batches(split, worker, workers, seed))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.workload.loss(model, batch)

    def samples(self, batch: Batch) -> int:
        return self.workload.samples(batch)

    def evaluate(self, model: Any, batch: Batch) -> Mapping[str, float]:
        return self.workload.evaluate(model, batch)

    def report(self, totals: dict[str, float]) -> Mapping[str, float]:
        return self.workload.report(totals)


def doubled(batch: Any) -> Any:
    """The batch with its real-valued tensors in float64, whatever nest holds them."""
    if isinstance(batch, Mapping):
        return {key: doubled(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(doubled, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(doubled, batch))
    return mapped(lambda one: one.double() if one.is_floating_point() else one, batch)
