"""How a group that is not exact fares: how much of it is sent, how much waits, and how often it was sent in vain.

What waits for long is old when it arrives. A residual that grows beside the weights, or a density that does not come
down, says that a method suits a group badly, long before the loss does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from armillary.exchanges.residual import RESIDUAL
from armillary.facts.table import Table
from armillary.runtime.consensus import distances
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.session.job import Job

__all__ = ["Health", "health_of", "health_table"]


@dataclass(frozen=True)
class Health:
    """Of one group, means over workers.

    density: the share of its values that the last exchange sent. residual: norm of what waits, over the norm of the
    weights. skipped: the share of exchanges that moved nothing, since some rank's numbers were not finite. distance: of
    the replicas from their mean, over its norm; None where all ranks hold the same weights.
    """

    group: str
    exchange: str
    density: float
    residual: float
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
        replace(Health(unit.name, departing[unit.name], *mean), distance=apart.get(unit.name))
        for unit, mean in zip(units, means, strict=True)
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
