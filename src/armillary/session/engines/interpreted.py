"""What carries out every schedule that is lowered to lists of instructions: pipelines, rings, stages on one device.

A schedule that registers no engine of its own goes this way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from armillary.exchanges.exchange import Place, build_dense
from armillary.facts.mesh import DATA
from armillary.runtime.cyclic.interpreter import Interpreter
from armillary.runtime.cyclic.seat import Seat, side_by_side
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.cyclic.team import Team, alone
from armillary.runtime.hybrid.dense_unit import DenseUnit, dense_unit
from armillary.schedules.chain import ranks_of_stages
from armillary.schedules.lowering import is_relayed
from armillary.session.cyclic.own_stages import OwnStages
from armillary.session.engines.contract import ENGINES, Engine, Parts
from armillary.session.feed import device_of
from armillary.session.workload import Batch

__all__ = ["InterpretedEngine", "engine_of"]


class InterpretedEngine:
    """Losses are known on the process of the last stage; where each runs all stages, on each those of its own data."""

    beside_bytes = 0.0

    def __init__(self, parts: Parts) -> None:
        schedule, tables, place = parts.course.schedule, parts.tables.by_stage, parts.transport.place
        self.parts, self.teller, self._own = parts, None, None
        if parts.options.method.is_side_by_side:
            seat = side_by_side(schedule, Team(place, parts.channel, groups=_groups(parts, place)), tables)
        else:
            one_queue = device_of(parts.job.model).type != "cpu"  # gloo has a lane for each direction, NCCL none
            together = parts.plan.mesh.sharing_data(place.rank)
            ranks = together if len(together) == schedule.workers else range(schedule.workers)
            seat = Seat(place.rank, ranks, parts.channel, _team(parts), tables, one_queue)
        self.runtime = Interpreter(parts.stages, parts.job.optimizer, parts.course, seat)
        self.settle, self.drain = self.runtime.settle, self.runtime.drain
        if len(set(seat.ranks)) > 1 and not is_relayed(schedule, seat.ranks):
            own = ranks_of_stages(schedule, seat.ranks)
            self.teller = own[-1]
            here = [stage for stage, rank in enumerate(own) if rank == place.rank]
            self._ranks = ranks_of_stages(schedule, range(len(seat.ranks)))  # of the first replica
            self._own = OwnStages(parts.stages, here, parts.transport)

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


def _team(parts: Parts) -> Team:
    """The ranks that hold the same stages."""
    mesh, place = parts.plan.mesh, parts.transport.place
    replicas = parts.options.replicas(place.workers)
    if replicas == 1:
        return alone()
    parts.transport.open_axis(DATA, mesh.members(DATA))
    own = Place(mesh.data_coordinate(place.rank), replicas)
    return Team(own, parts.channel, DATA, _groups(parts, own))


def _groups(parts: Parts, place: Place) -> dict[int, list[DenseUnit]]:
    """What is averaged over replicas, by stage; what mixes dtypes or devices travels apart.

    Args:
        place: of this rank among the replicas.
    """
    named, found = dict(parts.job.model.named_parameters()), dict[int, list[DenseUnit]]()
    for group in parts.plan.groups:
        if group.exchange is None or group.layout == "row_sharded":
            continue
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
        for name in group.parameters:
            kinds.setdefault((named[name].dtype, named[name].device), {})[name] = named[name]
        exchange = build_dense(group.exchange.name, **group.exchange.options)
        units = [dense_unit(group.name, members, exchange, place) for members in kinds.values()]
        found.setdefault(group.stage, []).extend(units)
    return found


def engine_of(schedule: str) -> Callable[[Parts], Engine]:
    """What carries out a schedule of that name."""
    return ENGINES.all().get(schedule, InterpretedEngine)
