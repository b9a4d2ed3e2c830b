"""Our `parallelize` for a contender that is built anew at every turn: measures and plans once, then only attaches.

The plan is that of the first turn, as it would be in a job that trains on; planning again at each turn would cost the
benchmark seconds and change nothing it times.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import armillary

Loss = Callable[[nn.Module, Any], Tensor]
KEPT: list[Any] = []  # what `auto_plan` decided
OPEN: list[armillary.Run] = []  # of the turn


def forget() -> None:
    """Links or model are about to change: the next turn plans anew."""
    KEPT.clear()


def parallelize(
    model: nn.Module, optimizer: Optimizer, batches: Iterable[Any], loss: Loss, prefetch: bool = False, **asked: Any
) -> armillary.Run:
    """As `armillary.parallelize`."""
    if not KEPT:
        KEPT.append(armillary.auto_plan(model, optimizer, batches, loss, **asked))
    found = KEPT[0]
    plan = found.plan
    if prefetch:
        held = armillary.assumptions_of(optimizer)
        plan = armillary.plan(found.profile, found.topology, assumptions=held, prefetch=True, **asked)
    run = armillary.attach(plan, model, optimizer, topology=found.topology)
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
