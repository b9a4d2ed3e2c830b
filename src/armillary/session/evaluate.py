"""Evaluates a model on held-out data: every rank takes its share, the sums are added up over ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from armillary.exchanges.look_up import State
from armillary.facts.plan import Plan
from armillary.runtime.transport import Transport
from armillary.session.edges_at_eval import CodedLeaves, edges_at_eval

__all__ = ["Measure", "Shown", "evaluated", "evaluating"]

Measure = Callable[[nn.Module, Any], Mapping[str, float]]


class Shown(Protocol):
    """What evaluation needs of whatever carries a plan out."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def coded(self) -> CodedLeaves: ...

    def newest(self) -> AbstractContextManager[None]:
        """Inside, the model holds the newest weights."""

    def finish(self, state: State = "finished") -> None:
        """Waits for all ranks to be so far, and serves them meanwhile."""


def evaluated(run: Shown, batches: Iterable[Any], measure: Measure) -> dict[str, float]:
    """What `measure(model, batch)` says of every rank's batches, added up: the same totals on every rank.

    A rank that is done serves the look-ups of the others.

    Raises:
        ValueError: no rank has a batch.
    """
    mine: dict[str, float] = {}
    with run.transport.unrecorded(), run.newest():
        edges = edges_at_eval(run.model, run.plan, run.transport.step, run.coded)
        with edges, evaluating(run.model), torch.no_grad():
            for batch in batches:
                for name, value in measure(run.model, batch).items():
                    mine[name] = mine.get(name, 0.0) + value
        run.finish("evaluated")
        everyones = run.transport.share(mine)
    totals: dict[str, float] = {}
    for theirs in everyones:
        for name, value in theirs.items():
            totals[name] = totals.get(name, 0.0) + value
    if not totals:
        raise ValueError(f"evaluate: no batch on any of {run.transport.place.workers} ranks")
    return totals


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model judges instead of training; every module is put back into the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
