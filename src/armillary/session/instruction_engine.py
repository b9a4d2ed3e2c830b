"""Carries out every schedule's list of instructions: pipelines, rings, stages on one device or on several.

In a pipeline only the last stage knows the losses of a step (`LossBroadcast`). It sends them as they come. Every rank,
the last stage included, returns them `lag` steps later, so a loop that stops by its losses stops at the same step
everywhere, and nobody waits.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from armillary.plans.requests import Receive, Send
from armillary.runtime.dense_unit import DenseUnit
from armillary.schedules.lowering import placed
from armillary.session.stage_setup import (
    LentStages,
    MicroBatch,
    OwnStages,
    StageSetup,
    ranks_of,
    replicas_of,
    share_first,
)
from armillary.session.workload import Batch, device_of
from armillary.stages.interpreter import Interpreter
from armillary.stages.optimizer_step import refuse_gradients
from armillary.stages.partition import ties_of
from armillary.stages.train_spec import StageContext, StepLosses, side_by_side
from armillary.transport.requests import Pending
from armillary.transport.transport import Transport

__all__ = ["InterpretedEngine", "LossBroadcast"]

LOSSES = "losses of a step"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # a message begins with a place in these


class LossBroadcast:
    """
    Args:
        teller: the process that knows. listeners: those that are to know, itself among them.
        lag: steps between handing a step in and looking for its losses.
    """

    def __init__(
        self, transport: Transport, teller: int, listeners: Sequence[int], micro_batches: int, lag: int
    ) -> None:
        self._transport, self._count, self._lag = transport, micro_batches, lag
        self._teller, self._peers = teller, [rank for rank in listeners if rank != teller]
        self._posted: deque[tuple[Pending, Tensor]] = deque()
        self._known: deque[StepLosses] = deque()
        self._sent: deque[tuple[Pending, Tensor]] = deque()
        self._asked = self._next = 0  # steps

    def begin_step(self) -> None:
        """Every process hands in a step next. There is room for its losses from now on."""
        self._asked += 1
        if not self._is_teller:
            room = torch.empty(1 + self._count, dtype=torch.float64)
            self._posted.append((self._transport.post(Receive(LOSSES, self._teller, room, LOSSES)), room))

    def take(self, known: Sequence[StepLosses], everything: bool = False) -> list[StepLosses]:
        """After a call of every process: what it knows, and what was told.

        Args:
            everything: whether nothing is under way any more.
        """
        for one in known:
            if self._is_teller:
                self._tell(one)
        if everything or not self._lag:
            self.see_over()
        found = []
        while self._next < self._asked and (everything or self._asked - self._next > self._lag):
            found.append(self._known.popleft() if self._is_teller else self._heard())
            self._next += 1
        return found

    def see_over(self) -> None:
        """Waits until the others have what was told."""
        while self._sent:
            self._sent.popleft()[0].wait()

    @property
    def _is_teller(self) -> bool:
        return self._transport.place.rank == self._teller

    def _tell(self, one: StepLosses) -> None:
        kind = torch.tensor(float(DTYPES.index(one.losses[0].dtype)), dtype=torch.float64)
        numbers = torch.stack([kind, *(loss.detach().double().cpu() for loss in one.losses)])
        self._sent += [(self._transport.post(Send(LOSSES, peer, numbers, LOSSES)), numbers) for peer in self._peers]
        while len(self._sent) > 4 * (self._lag + 1) * self._transport.place.workers:
            self._sent.popleft()[0].wait()
        self._known.append(one)

    def _heard(self) -> StepLosses:
        pending, room = self._posted.popleft()
        pending.wait()
        kind, *losses = room.unbind()
        return StepLosses(self._next, tuple(loss.to(DTYPES[int(kind)]) for loss in losses))


class InterpretedEngine:
    """Losses are known on the process of the last stage; where each runs all stages, on each those of its own data."""

    def __init__(self, parts: StageSetup) -> None:
        schedule, place = parts.spec.schedule, parts.transport.place
        self.parts, self.teller, self._own, self._lent = parts, None, None, None
        self._steps, self.hooks = 0, ExitStack()  # handed in; that refuse reads of weights which are lent
        replicas = replicas_of(parts)
        if replicas.reduces and ties_of(parts.stages):
            raise ValueError(
                "schedule: stages share parameters, and an exchange of the plan keeps gradients of earlier steps, "
                "which copies would not get; drop that exchange"
            )
        self.units = [unit for units in replicas.groups.values() for unit in units] if replicas.reduces else []
        for unit in self.units:
            unit.is_shown = False
        if parts.options.method.replicates_table:
            seat = side_by_side(schedule, replicas)
        else:
            one_queue = device_of(parts.job.model).type != "cpu"  # gloo has a lane for each direction, NCCL none
            seat = StageContext(place.rank, ranks_of(parts), parts.channel, replicas, one_queue)
        self.runtime = Interpreter(parts.stages, parts.job.optimizer, parts.spec, seat)
        self.settle, self.drain = self.runtime.settle, self.runtime.drain
        where = placed(schedule, seat.ranks)
        here = [j for j in self._numbers if place.rank in where.ranks(j)]
        self._here = [parts.stages[j] for j in here if j not in self.runtime.borrowed]
        if len(here) < schedule.stages:
            self.teller = where.ranks(schedule.stages - 1)[-1]
            owners = [parts.options.where.owner(j) for j in self._numbers]
            share_first(parts.stages, owners, parts.transport)
            self._own = OwnStages(parts.stages, here, parts.transport)
        if self.runtime.is_lent:  # also where this rank owns all: it is the one that the others wait for
            self._lent = LentStages(parts.job.model, parts.stages, self.runtime.borrowed, parts.transport.spread)
            self.hooks.push(self._lent.hooks)

    @property
    def lent_bytes(self) -> float:
        return self.runtime.lent_bytes.mean

    def given(self, batches: Sequence[Batch]) -> Sequence[MicroBatch]:
        refuse_gradients(self.parts.job.optimizer)
        return self.parts.given(batches)

    def step(self, given: Sequence[MicroBatch]) -> list[StepLosses]:
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
        owners = [self.parts.options.where.owner(j) for j in self._numbers]
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


def _is_alike(unit: DenseUnit) -> bool:
    return unit.exchange.keeps_replicas_alike
