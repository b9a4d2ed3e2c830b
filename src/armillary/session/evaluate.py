"""Evaluates a model on held-out data: every rank takes its share, the sums are added up over ranks.

Ranks that hold stages of one replica train on the same batches, so `run.shard` gives them the same held-out ones, too.
What they say of those counts once. Whether data is the same is seen in its bytes, as a user may divide it otherwise.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from armillary.exchanges.look_up import State
from armillary.facts.plan import Plan
from armillary.runtime.agreement import checksum
from armillary.runtime.transport import Transport
from armillary.session.edges_at_eval import CodedLeaves, edges_at_eval
from armillary.session.source import leaves

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
    """What `measure(model, batch)` says of every rank's batches, added up: the same totals on every rank. The same
    batches on several ranks of one replica count once.

    A rank that is done serves the look-ups of the others.

    Raises:
        ValueError: no rank has a batch.
    """
    mine: dict[str, float] = {}
    rank, mesh = run.transport.place.rank, run.plan.mesh
    is_alone = len(mesh.sharing_data(rank)) == 1
    drawn: list[int] = []  # checksums of all that was measured; not needed where nobody shares this rank's data
    with run.transport.unrecorded(), run.newest():
        edges = edges_at_eval(run.model, run.plan, run.transport.step, run.coded)
        with edges, evaluating(run.model), torch.no_grad():
            for batch in batches:
                drawn += [] if is_alone else map(checksum, leaves(batch))
                for name, value in measure(run.model, batch).items():
                    mine[name] = mine.get(name, 0.0) + value
        run.finish("evaluated")
        everyones = run.transport.share((mine, drawn))
    totals: dict[str, float] = {}
    counted: list[tuple[int, list[int]]] = []
    for other, (theirs, their_drawn) in enumerate(everyones):
        data = (mesh.data_coordinate(other), their_drawn)
        if their_drawn and data in counted:
            continue
        counted.append(data)
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
