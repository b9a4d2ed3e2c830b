"""What is asked of all ranks about their values: finite gradients, health of exchanges, replicas alike.

Each rank looks for values that are not finite before gradients leave. After an exchange every rank holds them, and
nobody could say whose they were. It costs one look at every gradient and one request of 8 bytes a backward. A
GradScaler skips a step on every rank where any rank's gradients are not finite.

Health of a group that is not exact: the share that is sent, the residual beside the weights, and exchanges in vain. It
tells that a method suits a group badly long before the loss does.

Replicas are compared where weights leave a run (save, export, evaluate, close), at the cost of one pass over the
parameters.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.exchanges.error_feedback import RESIDUAL
from armillary.plans.requests import summed
from armillary.plans.units import Table
from armillary.runtime.dense_unit import DenseUnit
from armillary.runtime.replica_checks import DriftReport, compare, warn
from armillary.runtime.weight_averaging import distances
from armillary.session.job import Job
from armillary.transport.transport import Transport

__all__ = [
    "FiniteCheck",
    "Health",
    "agree_on_found_inf",
    "health_of",
    "health_table",
    "is_apart",
    "refuse_apart",
    "unless_it_ends_an_error",
]


def agree_on_found_inf(scaler: Any, transport: Transport, serve: Callable[[], None]) -> Callable[[], None]:
    """Replaces the method by which a scaler looks at gradients. Returns what puts the scaler's own back.

    Args:
        serve: looks rows up for ranks that read on their own, until all are here.
    """
    unscale = scaler._unscale_grads_

    def unscale_alike(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = unscale(*args, **kwargs)
        with transport.within("unscaling of gradients"):
            serve()
            largest = transport.agree_largest([max((float(value) for value in found.values()), default=0.0)])
        for value in found.values():
            value.fill_(largest[0])
        return found

    def restore() -> None:
        vars(scaler).pop("_unscale_grads_", None)

    scaler._unscale_grads_ = unscale_alike
    return restore


@dataclass(frozen=True)
class Health:
    """Of one group, means over workers.

    density: the share of its values that the last exchange sent. residual: norm of what waits, over the norm of the
    weights; None where its state has no entry of that name. skipped: the share of exchanges that moved nothing, since
    some rank's numbers were not finite. distance: of the replicas from their mean, over its norm; None where all ranks
    hold the same weights.
    """

    group: str
    exchange: str
    density: float
    residual: float | None
    skipped: float
    distance: float | None = None


def health_of(run: Job) -> tuple[Health, ...]:
    """Of the groups that depart from exact. Every rank must call it; nothing is asked where there are none."""
    departing = {group.name: str(group.exchange) for group in run.plan.groups if group.departures}
    units = [unit for unit in run.units if isinstance(unit, DenseUnit) and unit.name in departing]
    if not units:
        return ()
    everyones = run.transport.share([_figures(unit) for unit in units])
    means = [[sum(figure) / len(everyones) for figure in zip(*theirs, strict=True)] for theirs in zip(*everyones)]
    apart = distances(units, run.transport)
    return tuple(
        Health(
            unit.name,
            departing[unit.name],
            density,
            waiting if RESIDUAL in unit.state else None,
            skipped,
            apart.get(unit.name),
        )
        for unit, (density, waiting, skipped) in zip(units, means, strict=True)
    )


def _figures(unit: DenseUnit) -> tuple[float, float, float]:
    weights = math.sqrt(sum(float(p.detach().double().norm()) ** 2 for p in unit.parameters))
    waiting = float(unit.state[RESIDUAL].double().norm()) if RESIDUAL in unit.state else 0.0
    density = unit.exchange.density(unit.bucket.layout, unit.state)
    return density, waiting / (weights or 1.0), unit.skipped / max(1, unit.pushes)


def health_table(found: Sequence[Health]) -> Table:
    """One row a group. How far replicas are apart, where some are."""
    are_apart = any(one.distance is not None for one in found)
    rows = []
    for one in found:
        figures = [one.density, one.residual, one.skipped, *[one.distance] * are_apart]
        rows.append((one.group, one.exchange, *("-" if figure is None else f"{figure:.3g}" for figure in figures)))
    columns = ("share of values sent", "residual : weights", "skipped", *["replicas' distance"] * are_apart)
    return Table(("not exact", "exchange", *columns), rows, (0, 1))


def is_apart(run: Job, call: str) -> DriftReport:
    """Collective, between two steps. Rounding is warned of here; an error is the caller's to raise."""
    with run.transport.unrecorded():
        comparison = compare(run.alike(), run.transport, f"{call}: after step {run.transport.step}")
    warn(comparison, run.transport)
    return comparison


def refuse_apart(run: Job, call: str) -> None:
    """Collective, between two steps.

    Raises:
        RuntimeError: ranks hold a parameter otherwise that the plan keeps alike. On every rank.
    """
    if error := is_apart(run, call).error:
        raise RuntimeError(f"rank {run.rank}: {error}")


def unless_it_ends_an_error(run: Job, call: str) -> str:
    """Collective: as `is_apart`, but nothing is compared where any rank is about to end an error. Empty where all is
    well."""
    with run.transport.unrecorded():
        is_error = any(run.transport.share(sys.exc_info()[0] is not None))
    return "" if is_error else is_apart(run, call).error


MOST_NAMES = 3  # in an error


class FiniteCheck:
    """`look` asks nobody; `compare` asks all ranks."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._nonfinite: list[str] = []

    def look(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """At gradients of this rank alone, with the names of their parameters."""
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and not bool(gradient.isfinite().all()):
                self._nonfinite.append(name)

    def compare(self) -> None:
        """Collective, at the end of a backward.

        Raises:
            FloatingPointError: some rank's gradient is not finite. On every rank; nothing was stepped.
        """
        nonfinite, self._nonfinite = list(dict.fromkeys(self._nonfinite)), []
        if not self.transport.complete(summed(torch.tensor([float(len(nonfinite))], dtype=torch.float64)), "finite"):
            return
        everyones = self.transport.share(nonfinite)
        told = "; ".join(f"rank {rank}: {_listed(names)}" for rank, names in enumerate(everyones) if names)
        raise FloatingPointError(
            f"check_finite: in step {self.transport.step + 1} gradients are not finite ({told}), and no rank stepped; "
            "look at that rank's batch and loss, or leave the step out on every rank: optimizer.zero_grad()"
        )

    def and_then(self, compare: Callable[[], None]) -> Callable[[], None]:
        """Both comparisons, one after the other."""

        def both() -> None:
            self.compare()
            compare()

        return both


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
