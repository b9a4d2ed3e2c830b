"""Our `parallelize` for a contender that is built anew at every turn: measures and plans once, then only attaches.

The plan is that of the first turn, as it would be in a job that trains on; planning again at each turn would cost the
benchmark seconds and change nothing it times.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary import Run, attach, auto_plan
from armillary.planning.prefetch import prefetching
from armillary.session.events import Decided

Loss = Callable[[nn.Module, Any], Tensor]
KEPT: list[Decided] = []
OPEN: list[Run] = []  # of the turn


def forget() -> None:
    """Links or model are about to change: the next turn plans anew."""
    KEPT.clear()


def parallelize(
    model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], loss: Loss, prefetch: bool = False
) -> Run:
    """As `armillary.parallelize`."""
    if not KEPT:
        KEPT.append(auto_plan(model, optimizer, batches, loss))
    found = KEPT[0]
    plan = prefetching(found.plan, found.profile, found.topology) if prefetch else found.plan
    run = attach(plan, model, optimizer, topology=found.topology)
    OPEN.append(run)
    return run


@contextmanager
def closing() -> Iterator[None]:
    """At the end of a turn its connections are closed: a job that trains has one run, and idle threads of others would
    wake in everyone's later turns. Not after an error, which ends the job: ranks would wait for the one that failed."""
    yield
    for run in OPEN:
        run.close(gather=False)
    OPEN.clear()
