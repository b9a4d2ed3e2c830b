"""The ranks that hold what this one holds, with data of their own, and what crosses between them by exchanges."""

from collections.abc import Sequence

from armillary.exchanges.exchange import RankInfo, build_dense, dense_exchanges
from armillary.facts.mesh import DATA
from armillary.runtime.cyclic.stage_replicas import StageReplicas
from armillary.runtime.hybrid.dense_unit import DenseUnit, dense_unit
from armillary.schedules.by_worker import placed
from armillary.schedules.placement import Ranks
from armillary.session.data_place import data_place
from armillary.session.engines.contract import Parts

__all__ = ["beside_bytes", "ranks_of", "replicas_of"]


def ranks_of(parts: Parts) -> Ranks:
    """Who runs what, of this rank's replica."""
    rank, workers = parts.rank, parts.spec.schedule.workers
    if parts.options.method.is_side_by_side:
        return [rank] * workers
    together = parts.plan.mesh.sharing_data(rank)
    return parts.options.ranks(together if len(together) == workers else range(workers))


def replicas_of(parts: Parts) -> StageReplicas:
    """The ranks that hold the same stages."""
    mesh, whole = parts.plan.mesh, parts.transport.place
    replicas = parts.options.replicas(whole.workers)
    place = RankInfo(0, 1) if replicas == 1 else data_place(mesh, whole)
    is_everybody = replicas == whole.workers
    if not is_everybody and replicas > 1:
        parts.transport.open_axis(DATA, mesh.members(DATA))
    return StageReplicas(place, parts.channel, "world" if is_everybody else DATA, _groups(parts, place))


def beside_bytes(units: Sequence[DenseUnit]) -> float:
    """Gradients as they cross, and what their exchanges keep."""
    buckets = [bucket.flat for unit in units for bucket in (unit.bucket, unit.spare) if bucket is not None]
    kept = [*buckets, *(one for unit in units for one in unit.state.values())]
    return float(sum(one.nbytes for one in kept))


def _groups(parts: Parts, place: RankInfo) -> dict[int, list[DenseUnit]]:
    """What crosses by exchanges, of the stages here.

    Args:
        place: of this rank among the replicas.
    """
    where = placed(parts.spec.schedule, ranks_of(parts))
    here = {stage.index for stage in parts.stages if parts.rank in where.ranks(stage.index)}
    named, found = dict(parts.job.model.named_parameters()), dict[int, list[DenseUnit]]()
    for group in parts.plan.groups:
        choice = group.exchange
        if choice is not None and choice.name in dense_exchanges() and group.stage in here:
            members = {name: named[name] for name in group.parameters}
            unit = dense_unit(group.name, members, build_dense(choice.name, **choice.options), place)
            found.setdefault(group.stage, []).append(unit)
    return found
