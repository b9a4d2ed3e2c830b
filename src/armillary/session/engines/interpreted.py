"""What carries out every schedule's list of instructions: pipelines, rings, stages on one device or on several."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from armillary.runtime.cyclic.delayed_step import refuse_gradients
from armillary.runtime.cyclic.interpreter import Interpreter
from armillary.runtime.cyclic.seat import Seat, side_by_side
from armillary.runtime.cyclic.step_losses import StepLosses
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.runtime.partition.stages import ties_of
from armillary.schedules.by_worker import placed
from armillary.session.cyclic.lent_stages import LentStages
from armillary.session.cyclic.own_stages import OwnStages, share_first
from armillary.session.engines.contract import Given, Parts
from armillary.session.engines.replicas import beside_bytes, ranks_of, replicas_of
from armillary.session.feed import device_of
from armillary.session.workload import Batch

__all__ = ["InterpretedEngine"]


class InterpretedEngine:
    """Losses are known on the process of the last stage; where each runs all stages, on each those of its own data."""

    def __init__(self, parts: Parts) -> None:
        schedule, place = parts.spec.schedule, parts.transport.place
        self.parts, self.teller, self._own, self._lent = parts, None, None, None
        self._steps = 0  # handed in
        replicas = replicas_of(parts)
        if replicas.reduces and ties_of(parts.stages):
            raise ValueError(
                "schedule: stages share parameters, and an exchange of the plan keeps gradients of earlier steps, "
                "which copies would not get; drop that exchange"
            )
        self.units = [unit for units in replicas.groups.values() for unit in units] if replicas.reduces else []
        for unit in self.units:
            unit.is_shown = False
        if parts.options.method.is_side_by_side:
            seat = side_by_side(schedule, replicas)
        else:
            one_queue = device_of(parts.job.model).type != "cpu"  # gloo has a lane for each direction, NCCL none
            seat = Seat(place.rank, ranks_of(parts), parts.channel, replicas, one_queue)
        self.runtime = Interpreter(parts.stages, parts.job.optimizer, parts.spec, seat)
        self.settle, self.drain = self.runtime.settle, self.runtime.drain
        where = placed(schedule, seat.ranks)
        here = [j for j in self._numbers if place.rank in where.ranks(j)]
        self._here = [parts.stages[j] for j in here if j not in self.runtime.borrowed]
        if len(here) < schedule.stages:
            self.teller = where.ranks(schedule.stages - 1)[-1]
            owners = [parts.options.method.owner(parts.options, j) for j in self._numbers]
            share_first(parts.stages, owners, parts.transport)
            self._own = OwnStages(parts.stages, here, parts.transport)
        if self.runtime.is_lent:  # also where this rank owns all: it is the one that the others wait for
            self._lent = LentStages(parts.job.model, parts.stages, self.runtime.borrowed, parts.transport.spread)

    @property
    def beside_bytes(self) -> float:
        return beside_bytes(self.units) + self.runtime.lent_bytes.mean

    def given(self, batches: Sequence[Batch]) -> Sequence[Given]:
        refuse_gradients(self.parts.job.optimizer)
        return self.parts.given(batches)

    def step(self, given: Sequence[Given]) -> list[StepLosses]:
        self._steps += 1
        return self.runtime.step(given)

    def alike(self) -> Mapping[str, Tensor]:
        """Of the stages that run here and whose weights stay here."""
        apart = {name for unit in self.units if not _is_alike(unit) for name in unit.bucket.layout.names}
        own = ((one.names[name], p) for one in self._here for name, p in one.module.named_parameters())
        named = {name: p for name, p in own if p.requires_grad}
        return {name: parameter for name, parameter in named.items() if name not in apart}

    @contextmanager
    def newest(self) -> Iterator[None]:
        owners = [self.parts.options.method.owner(self.parts.options, j) for j in self._numbers]
        if self._lent is not None:
            with self._lent.whole(owners):
                yield
        elif self._own is not None:
            with self._own.whole(owners, [self._keeper(j) for j in self._numbers]):
                yield
        else:
            yield

    def _keeper(self, stage: int) -> int:
        """The process whose buffers are the newest, of the first replica: that of the last micro-batch."""
        schedule = self.parts.spec.schedule
        first = placed(schedule, self.parts.options.ranks(range(schedule.workers)))
        return first.rank_of((max(self._steps - 1, 0), schedule.micro_batches - 1, stage))

    @property
    def _numbers(self) -> range:
        return range(len(self.parts.stages))

    def detach(self) -> None:
        """Takes the hooks off that refuse reads of weights which are lent."""
        if self._lent is not None:
            self._lent.detach()


def _is_alike(unit: DenseUnit) -> bool:
    return unit.exchange.keeps_replicas_alike
