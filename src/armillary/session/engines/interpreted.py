"""What carries out every schedule that is lowered to lists of instructions: pipelines, rings, stages on one device.

A schedule that registers no engine of its own goes this way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from armillary.exchanges.exchange import Place, build_dense, dense_exchanges
from armillary.facts.mesh import DATA
from armillary.runtime.cyclic.interpreter import Interpreter
from armillary.runtime.cyclic.seat import Seat, side_by_side
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.cyclic.team import Team
from armillary.runtime.hybrid.dense_unit import DenseUnit, dense_unit
from armillary.schedules.chain import ranks_of_stages
from armillary.schedules.lowering import is_relayed
from armillary.session.cyclic.own_stages import OwnStages
from armillary.session.data_place import data_place
from armillary.session.engines.contract import ENGINES, Engine, Parts
from armillary.session.feed import device_of
from armillary.session.workload import Batch

__all__ = ["InterpretedEngine", "engine_of"]


class InterpretedEngine:
    """Losses are known on the process of the last stage; where each runs all stages, on each those of its own data."""

    def __init__(self, parts: Parts) -> None:
        schedule, tables, place = parts.course.schedule, parts.tables.by_stage, parts.transport.place
        self.parts, self.teller, self._own = parts, None, None
        team = _team(parts)
        self.units = [unit for units in team.groups.values() for unit in units]
        if parts.options.method.is_side_by_side:
            seat = side_by_side(schedule, team, tables)
        else:
            one_queue = device_of(parts.job.model).type != "cpu"  # gloo has a lane for each direction, NCCL none
            seat = Seat(place.rank, _ranks(parts), parts.channel, team, tables, one_queue)
        self.runtime = Interpreter(parts.stages, parts.job.optimizer, parts.course, seat)
        self.settle, self.drain = self.runtime.settle, self.runtime.drain
        if len(set(seat.ranks)) > 1 and not is_relayed(schedule, seat.ranks):
            own = ranks_of_stages(schedule, seat.ranks)
            self.teller = own[-1]
            here = [stage for stage, rank in enumerate(own) if rank == place.rank]
            self._ranks = ranks_of_stages(schedule, range(len(seat.ranks)))  # of the first replica
            self._own = OwnStages(parts.stages, here, parts.transport)

    @property
    def beside_bytes(self) -> float:
        """Gradients as they cross, and what their exchanges keep."""
        buckets = [bucket.flat for unit in self.units for bucket in (unit.bucket, unit.spare) if bucket is not None]
        kept = [*buckets, *(one for unit in self.units for one in unit.state.values())]
        return float(sum(one.nbytes for one in kept))

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return self.runtime.step(self.parts.given(batches))

    @contextmanager
    def newest(self) -> Iterator[None]:
        if self._own is None:
            yield
            return
        with self._own.whole(self._ranks, self._ranks):
            yield

    def detach(self) -> None:
        """There is no hook."""


def _ranks(parts: Parts) -> Sequence[int]:
    """By worker of the schedule, of this rank's replica."""
    rank, workers = parts.rank, parts.course.schedule.workers
    if parts.options.method.is_side_by_side:
        return [rank] * workers
    together = parts.plan.mesh.sharing_data(rank)
    return together if len(together) == workers else range(workers)


def _team(parts: Parts) -> Team:
    """The ranks that hold the same stages."""
    mesh, whole = parts.plan.mesh, parts.transport.place
    replicas = parts.options.replicas(whole.workers)
    place = Place(0, 1) if replicas == 1 else data_place(mesh, whole)
    is_everybody = replicas == whole.workers
    if not is_everybody and replicas > 1:
        parts.transport.open_axis(DATA, mesh.members(DATA))
    return Team(place, parts.channel, "world" if is_everybody else DATA, _groups(parts, place))


def _groups(parts: Parts, place: Place) -> dict[int, list[DenseUnit]]:
    """What crosses by exchanges, of the stages here.

    Args:
        place: of this rank among the replicas.
    """
    schedule, ranks = parts.course.schedule, _ranks(parts)
    here = {action.stage for row, rank in zip(schedule.ticks, ranks) if rank == parts.rank for action in row}
    named, found = dict(parts.job.model.named_parameters()), dict[int, list[DenseUnit]]()
    for group in parts.plan.groups:
        choice = group.exchange
        if choice is not None and choice.name in dense_exchanges() and group.stage in here:
            members = {name: named[name] for name in group.parameters}
            unit = dense_unit(group.name, members, build_dense(choice.name, **choice.options), place)
            found.setdefault(group.stage, []).append(unit)
    return found


def engine_of(schedule: str) -> Callable[[Parts], Engine]:
    """What carries out a schedule of that name."""
    return ENGINES.all().get(schedule, InterpretedEngine)
