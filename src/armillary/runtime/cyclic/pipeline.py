"""One process per stage: activations go up, their gradients come down, one row of a pipeline schedule each.

The cyclic pipeline never flushes: while a stage runs backwards of one step it already runs forwards of the next, with
weights at most one step old. GPipe and 1F1B are other tables for the same runtime, and so its fair baselines. There is
no clock: a process does its actions in the table's order and waits only for what the next one needs.

Note [Tables in a pipeline]. The rows of a stage's tables are owned by all processes, so all take part in its look-ups
and pushes. Every process therefore has these of the table's stage among its own actions, in the order of the schedule.
Whatever an action waits for, a message or the others, has an earlier place in that one order, so nobody waits in a
circle; and a step ends at the same tick for all, so that a process that leaves `step` has left nobody waiting in it.

Source: Fournier & Oyallon, 2024 (pipeline mode); with slack >= M it is PipeDream-2BW (Narayanan et al., 2021).
"""

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from armillary.runtime.channel import Channel
from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.autocast import Autocast, without_autocast
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.delayed_step import options_of, refuse_gradients
from armillary.runtime.cyclic.edge import Incoming, Outgoing
from armillary.runtime.cyclic.norm_chain import NormChain
from armillary.runtime.cyclic.remedied_step import RemediedStep
from armillary.runtime.cyclic.stage_pass import Flight, Reads, Value, enter, take_off
from armillary.runtime.cyclic.stage_tables import Tables
from armillary.runtime.cyclic.step_losses import LossBook, StepLosses
from armillary.runtime.cyclic.updates import Updates
from armillary.runtime.cyclic.versions import StageWeights
from armillary.schedules.agenda import Agenda, Due
from armillary.schedules.messages import carrier, pipeline_messages
from armillary.schedules.norm_in_time import refuse_in_pipeline
from armillary.schedules.schedule import Place

__all__ = ["Pipeline"]


class Pipeline:
    """This process's stage. Every process makes the same calls.

    Args:
        stage: of this process; its index is the process's rank and its row in the schedule.
        optimizer: over this stage's parameters (others are never stepped).
        channel: to the neighbours, whose ranks are their stages.
        tables: of every stage that reads some, this one's or not.

    Raises:
        ValueError: the schedule is no pipeline, has no such stage, or no time for the norm to clip by.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: Optimizer,
        course: Course,
        channel: Channel,
        tables: Tables = MappingProxyType({}),
    ) -> None:
        schedule = course.schedule
        pipeline_messages(schedule)  # refuses what is no pipeline
        refuse_in_pipeline(schedule, course.clip)
        if stage.index >= schedule.stages:
            raise ValueError(f"pipeline: stage {stage.index} is none of the schedule's {schedule.stages}")
        self.schedule, self.drains = schedule, list[int]()
        self._stage, self._optimizer, self._course = stage, optimizer, course
        remedied = RemediedStep(optimizer, schedule, stage.index, course.remedies)
        self._weights = StageWeights(stage, remedied, schedule.micro_batches)
        self._tables = tables  # see Note [Tables in a pipeline]
        self._agenda = Agenda(schedule, {stage.index, *tables}, range(schedule.stages) if tables else ())
        self._postponed = list[Due]()
        self._steps = 0
        self._updates = Updates([self._weights], course.clip, self.drains)
        self._autocasts: dict[int, Autocast] = {}  # by step
        self._done = {j: [0] * schedule.micro_batches for j in (stage.index, *tables)}
        self._flights: dict[Place, Flight] = {}
        self._inputs: dict[tuple[int, int], Any] = {}
        self._targets: dict[tuple[int, int], Any] = {}
        self._book = LossBook(schedule.micro_batches)
        self._connect(channel)

    def _connect(self, channel: Channel) -> None:
        j, device = self._stage.index, next((p.device for p in self._stage.module.parameters()), torch.device("cpu"))
        self._device_type = device.type
        first, last = j == 0, j == self.schedule.stages - 1
        self._from_below = None if first else Incoming(channel, j - 1, device)
        self._to_below = None if first else Outgoing(channel, j - 1)
        self._from_above = None if last else Incoming(channel, j + 1, device)
        self._to_above = None if last else Outgoing(channel, j + 1)
        clip = self._course.clip
        needs_norms = clip is not None and clip.needs_all_stages
        self._norms = NormChain(channel, j, range(self.schedule.stages), device) if needs_norms else None
        self._known = 0  # steps whose norm is known here
        self._carrier = carrier(self.schedule)

    def step(self, micro_batches: Sequence[tuple[Any, Any]]) -> list[StepLosses]:
        """Hands in one training step: per micro-batch, what the first stage reads and what the last one's loss wants.

        Returns the steps whose losses are all there now (on the last stage; elsewhere nothing). The step's last action
        is left for the next call, so that the next activation is under way meanwhile.

        Raises:
            ValueError: another number of micro-batches than the schedule's.
        """
        if len(micro_batches) != self.schedule.micro_batches:
            raise ValueError(f"pipeline: got {len(micro_batches)} micro-batches, want {self.schedule.micro_batches}")
        refuse_gradients(self._optimizer)
        self._optimizer.step()  # without gradients: nothing moves, but schedulers want to have seen a step
        self._updates.begin(self._steps, options_of(self._optimizer))
        for tables in self._tables.values():
            tables.begin(self._steps, options_of(self._optimizer))
        self._autocasts[self._steps] = Autocast.now(self._device_type)
        if self._norms is not None:
            self._norms.begin()
        for micro_batch, (value, target) in enumerate(micro_batches):
            if self._from_below is None:
                self._inputs[self._steps, micro_batch] = value
            else:
                self._from_below.post()
            if self._to_above is None:
                self._targets[self._steps, micro_batch] = target
        self._steps += 1
        actions = [*self._postponed, *self._agenda.next_step()]
        self._postponed = [] if self._tables else [actions.pop()]
        return self._work_off(actions)

    def settle(self) -> list[StepLosses]:
        """Finishes what is in flight: the stage holds its newest weights, and training is unchanged."""
        actions, self._postponed = [*self._postponed, *self._agenda.rest()], []
        finished = self._work_off(actions)
        for edge in (self._to_above, self._to_below):
            if edge is not None:
                edge.wait()
        for tables in self._tables.values():
            tables.settle()
        if self._norms is not None:
            self._learn_norms(self._steps)
            self._norms.wait()
        return finished

    def drain(self) -> list[StepLosses]:
        """Settles, and lets the next step start as the first did: it reads the newest weights everywhere."""
        finished = self.settle()
        self.drains.append(self._steps)
        self._weights.drain()
        return finished

    def _work_off(self, actions: Iterable[Due]) -> list[StepLosses]:
        for due in actions:
            if due.stage != self._stage.index:
                self._serve(due)
                continue
            with without_autocast(self._device_type):
                version = self._forward(due.place) if due.kind == "F" else self._backward(due.place)
            self._course.observe(due, version, self._flights.keys())
        return self._book.complete()

    def _serve(self, due: Due) -> None:
        """This process's part in the tables of another stage."""
        tables = self._tables[due.stage]
        if due.kind == "F":
            tables.visit(due.place, self.schedule.version(due.place, self.drains)).serve()
            self._done[due.stage][due.micro_batch] += 1
        elif due.micro_batch == self.schedule.micro_batches - 1:
            tables.learn(due.step)
        tables.forget(self._oldest(due.stage))

    def _forward(self, place: Place) -> int:
        step, micro_batch, _ = place
        # the norm of step s comes ahead of its carrier, counted on from the first micro-batch of step s + 1
        self._learn_norms(step + (micro_batch - self._carrier) // self.schedule.micro_batches)
        version = self.schedule.version(place, self.drains)
        target, j = self._targets.pop((step, micro_batch), None), self._stage.index
        arrived = self._arrived(step, micro_batch)
        value, self._flights[place] = take_off(
            self._stage,
            Reads(
                version,
                self._weights.read(step, micro_batch, version),
                self._tables[j].visit(place, version) if j in self._tables else None,
            ),
            arrived,
            (self._course.seed, place),
            self._autocasts[step],
            loss=(lambda output: self._course.loss(output, target)) if self._to_above is None else None,
            keep=j not in self._course.recompute,
        )
        if self._to_above is None or self._from_above is None:
            self._book.enter(step, micro_batch, value.leaves[0])
        else:
            self._from_above.post()
            self._to_above.send(value.leaves, value.spec)
        self._done[j][micro_batch] += 1
        self._forget()
        return version

    def _arrived(self, step: int, micro_batch: int) -> Value:
        if self._from_below is None:
            return enter(self._inputs.pop((step, micro_batch)))
        return Value(*self._from_below.take())

    def _backward(self, place: Place) -> int:
        step, micro_batch, _ = place
        flight = self._flights.pop(place)
        gradients = None
        if self._from_above is not None and self._to_above is not None:
            gradients, _ = self._from_above.take()
            self._to_above.wait(keep=len(self._flights))  # its gradient came back, so the activation has arrived
        self._weights.expect(step, micro_batch)
        landed = flight.land(gradients, self._weights.add)
        if self._to_below is not None:
            self._to_below.send(*tree_flatten(landed.value))
            self._to_below.wait(keep=2)
        means = self._weights.complete(step, micro_batch, landed.beside)
        if means is not None:
            square = self._updates.complete(self._weights, step, means)
            whole = self._norms.add(square) if self._norms is not None and square is not None else None
            if whole is not None:  # on stage 0
                self._known += 1
                self._updates.know(step, whole)
            if self._stage.index in self._tables:
                self._tables[self._stage.index].learn(step)
        self._autocasts = {s: kept for s, kept in self._autocasts.items() if s >= self._updates.first_open}
        self._forget()
        return flight.version

    def _learn_norms(self, steps: int) -> None:
        """Takes the norms of the steps before `steps` that are not known here yet."""
        while self._norms is not None and self._known < steps:
            self._known += 1
            self._updates.know(self._known - 1, self._norms.take())

    def _forget(self) -> None:
        """Drops the versions that no forward to come reads."""
        oldest = self._oldest(self._stage.index)
        self._weights.forget(oldest)
        if self._stage.index in self._tables:
            self._tables[self._stage.index].forget(oldest)

    def _oldest(self, stage: int) -> int:
        """The oldest version of a stage that a forward to come reads."""
        places = ((done, micro_batch, stage) for micro_batch, done in enumerate(self._done[stage]))
        return min(self.schedule.version(place, self.drains) for place in places)
