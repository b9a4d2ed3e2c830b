"""What carries out every schedule that is lowered to lists of instructions: pipelines, rings, stages on one device.

A schedule that registers no engine of its own goes this way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from armillary.runtime.cyclic.interpreter import Interpreter
from armillary.runtime.cyclic.seat import Seat, side_by_side
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.schedules.chain import ranks_of_stages
from armillary.schedules.lowering import is_relayed
from armillary.session.cyclic.lent_stages import LentStages
from armillary.session.cyclic.own_stages import OwnStages
from armillary.session.engines.contract import ENGINES, Engine, Parts
from armillary.session.engines.replicas import beside_bytes, ranks_of, team_of
from armillary.session.feed import device_of
from armillary.session.workload import Batch

__all__ = ["InterpretedEngine", "engine_of"]


class InterpretedEngine:
    """Losses are known on the process of the last stage; where each runs all stages, on each those of its own data."""

    def __init__(self, parts: Parts) -> None:
        schedule, tables, place = parts.spec.schedule, parts.tables.by_stage, parts.transport.place
        self.parts, self.teller, self._own, self._lent = parts, None, None, None
        team = team_of(parts)
        self.units = [unit for units in team.groups.values() for unit in units] if team.reduces else []
        if parts.options.method.is_side_by_side:
            seat = side_by_side(schedule, team, tables)
        else:
            one_queue = device_of(parts.job.model).type != "cpu"  # gloo has a lane for each direction, NCCL none
            seat = Seat(place.rank, ranks_of(parts), parts.channel, team, tables, one_queue)
        self.runtime = Interpreter(parts.stages, parts.job.optimizer, parts.spec, seat)
        self.settle, self.drain = self.runtime.settle, self.runtime.drain
        if len(set(seat.ranks)) > 1 and not is_relayed(schedule, seat.ranks):
            own = ranks_of_stages(schedule, seat.ranks)
            self.teller = own[-1]
            here = [stage for stage, rank in enumerate(own) if rank == place.rank]
            self._ranks = ranks_of_stages(schedule, range(len(seat.ranks)))  # of the first replica
            self._own = OwnStages(parts.stages, here, parts.transport)
        if self.runtime.borrowed:
            self._lent = LentStages(parts.job.model, parts.stages, self.runtime.borrowed, parts.transport.spread)

    @property
    def beside_bytes(self) -> float:
        return beside_bytes(self.units) + self.runtime.beside_bytes

    def step(self, batches: Sequence[Batch]) -> list[StepLosses]:
        return self.runtime.step(self.parts.given(batches))

    @contextmanager
    def newest(self) -> Iterator[None]:
        if self._lent is not None:
            with self._lent.whole([self.parts.options.method.owner(self.parts.options, j) for j in self._numbers]):
                yield
        elif self._own is not None:
            with self._own.whole(self._ranks, self._ranks):
                yield
        else:
            yield

    @property
    def _numbers(self) -> range:
        return range(len(self.parts.stages))

    def detach(self) -> None:
        """Takes the hooks off that refuse reads of weights which are lent."""
        if self._lent is not None:
            self._lent.detach()


def engine_of(schedule: str) -> Callable[[Parts], Engine]:
    """What carries out a schedule of that name."""
    return ENGINES.all().get(schedule, InterpretedEngine)
