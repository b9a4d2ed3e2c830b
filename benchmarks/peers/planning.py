"""Our `parallelize` for a contender that is built anew at every turn: measures and plans once, then only attaches.

The plan is that of the first turn, as it would be in a job that trains on; planning again at each turn would cost the
benchmark seconds and change nothing it times.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.facts.plan import Plan
from armillary.planning.look_ahead import looking_ahead
from armillary.runtime.transport import Transport
from armillary.session.attach import attach
from armillary.session.decide import Subject, Wishes, assumptions_of, decide
from armillary.session.events import Decided
from armillary.session.run import Run

Loss = Callable[[nn.Module, Any], Tensor]
KEPT: list[Decided] = []
OPEN: list[Transport] = []  # of the turn


def forget() -> None:
    """Links or model are about to change: the next turn plans anew."""
    KEPT.clear()


def parallelize(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], loss: Loss) -> Run:
    """As `armillary.parallelize`."""
    return _attached(_decided(model, optimizer, batches, loss).plan, model, optimizer)


def parallelize_ahead(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], loss: Loss) -> Run:
    """The same plan with look-ahead."""
    found = _decided(model, optimizer, batches, loss)
    plan = looking_ahead(found.plan, found.profile, found.topology, assumptions_of(optimizer))
    return _attached(plan, model, optimizer)


@contextmanager
def closing() -> Iterator[None]:
    """At the end of a turn its connections are closed: a job that trains has one run, and idle threads of others would
    wake in everyone's later turns. Not after an error, which ends the job: ranks would wait for the one that failed."""
    yield
    for transport in OPEN:
        transport.barrier()
        transport.close()
    OPEN.clear()


def _attached(plan: Plan, model: nn.Module, optimizer: Optimizer) -> Run:
    run = attach(plan, model, optimizer)
    OPEN.append(run.transport)
    return run


def _decided(model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], loss: Loss) -> Decided:
    if not KEPT:
        few = list(batches)
        KEPT.append(decide(Subject(model, optimizer, loss, lambda _: few), Wishes()))
    return KEPT[0]
