"""Whether what every rank should hold alike still is alike: checksums of parameters, now and then.

After an exchange every rank holds the same gradient, takes the same step and so has the same weights. Nothing else
would show that this has ended, on one rank, by its own doing: each would train on, away from the others.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from armillary.facts.collectives import AllGather, Program
from armillary.runtime.agreement import checksum
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.runtime.transport import Transport

__all__ = ["refuse_drift"]

EVERY = 1000
EARLY = (3, 10, 100)  # most faults are there from the beginning; the first two steps of a loop are watched
ROUNDING = 1e-5  # of a tensor's norm: what unlike processors make of the same steps


def refuse_drift(units: Sequence[object], transport: Transport, serve: Callable[[], None]) -> None:
    """After a step, on all ranks: looks in steps 3, 10, 100 and every 1,000.

    Args:
        serve: waits for ranks that look at rows on their own before they step.

    Raises:
        RuntimeError: ranks hold a parameter otherwise; the message names it, and who. If that is little more than
            rounding, it is a warning.
    """
    steps = transport.step
    if transport.place.workers == 1 or not (steps % EVERY == 0 or steps in EARLY):
        return
    named = dict(_alike(units))
    if not named:
        return
    mine = torch.tensor([checksum(value) for value in named.values()])
    with transport.unrecorded():
        serve()
        everyones: Tensor = transport.complete(_gathered(mine), "checksums")
        unlike = [name for name, sums in zip(named, everyones.unbind(1), strict=True) if len(sums.unique()) > 1]
        if unlike:
            values = transport.complete(_gathered(named[unlike[0]].detach().reshape(-1)), "checksums")
            _tell(unlike, values.double(), transport)


def _gathered(tensor: Tensor) -> Program[Tensor]:
    found: Tensor = yield AllGather(tensor)
    return found


def _alike(units: Sequence[object]) -> Iterator[tuple[str, Tensor]]:
    """What all ranks should hold alike, by name."""
    for unit in units:
        if isinstance(unit, DenseUnit) and unit.exchange.keeps_replicas_alike:
            yield from zip(unit.bucket.layout.names, unit.parameters, strict=True)


def _tell(unlike: Sequence[str], values: Tensor, transport: Transport) -> None:
    """values: of the first that is unlike, by rank."""
    apart = (values - values[0]).norm(dim=1) / (values[0].norm() or 1.0)
    rank = int(apart.nan_to_num(torch.inf).argmax())
    names = unlike[0] + (f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else "")
    said = (
        f"after step {transport.step} the ranks no longer hold {names} alike: rank {rank} is "
        f"{float(apart[rank]):.1e} of its norm away from rank 0"
    )
    if float(apart[rank]) <= ROUNDING:
        if transport.place.rank == 0:
            warnings.warn(f"{said}; unlike processors round otherwise, and this grows slowly", stacklevel=2)
        return
    raise RuntimeError(
        f"rank {transport.place.rank}: {said}. Change parameters, optimizer options and .grad alike on every rank, and "
        "begin again from a checkpoint"
    )
