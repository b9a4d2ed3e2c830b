"""N staggered micro-batches in a process, on one device and one stream: the schedule, carried out tick by tick.

Deterministic, and equal to the reference bit for bit on a CPU. What it gains is memory: half of what N concurrent
micro-batches hold, evenly over time. On one stream the caching allocator can reuse every block, so the saving is real.

Several ranks may do the same side by side, each on a device and micro-batches of its own (`team.py`).

Source: Fournier & Oyallon, 2024, single-device mode. The same runtime carries out every other schedule (simultaneous,
accumulation), which are its fair baselines.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.autocast import Autocast, device_type_of, without_autocast
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.delayed_step import options_of, refuse_gradients
from armillary.runtime.cyclic.remedied_step import RemediedStep
from armillary.runtime.cyclic.stage_pass import Flight, Gradients, Reads, Value, enter, take_off
from armillary.runtime.cyclic.step_losses import LossBook, StepLosses
from armillary.runtime.cyclic.team import Team, alone
from armillary.runtime.cyclic.updates import Updates
from armillary.runtime.cyclic.versions import StageWeights
from armillary.schedules.agenda import Agenda, Due
from armillary.schedules.clipping import square_of_step
from armillary.schedules.norm_in_time import refuse_on_one_device
from armillary.schedules.schedule import Place

__all__ = ["OneDevice"]


class OneDevice:
    """Begins empty; each `step` hands in one training step and works it off as far as needs no later one.

    Args:
        stages: the model, cut.
        optimizer: the user's, over the parameters of the model.
        team: the ranks that do the same, and the tables whose rows they own; this one alone if not said.

    Raises:
        ValueError: the schedule has another number of stages, or no time for the norm to clip by.
    """

    def __init__(self, stages: Sequence[Stage], optimizer: Optimizer, course: Course, team: Team | None = None) -> None:
        schedule = course.schedule
        if len(stages) != schedule.stages:
            raise ValueError(
                f"one_device: the schedule has {schedule.stages} stages, the model is cut into {len(stages)}"
            )
        refuse_on_one_device(schedule, course.clip)
        self.schedule, self.drains = schedule, list[int]()
        self._stages, self._optimizer, self._course, self._team = stages, optimizer, course, team or alone()
        self._tables = self._team.tables
        steps = [RemediedStep(optimizer, schedule, stage.index, course.remedies) for stage in stages]
        self._weights = [StageWeights(stage, step, schedule.micro_batches) for stage, step in zip(stages, steps)]
        self._agenda = Agenda(schedule, range(schedule.workers))
        self._steps = 0
        self._updates = Updates(self._weights, course.clip, self.drains)
        self._squares: dict[int, dict[int, Tensor]] = {}  # of finished gradients, by step and stage
        self._device_type = device_type_of(p for stage in stages for p in stage.module.parameters())
        self._autocasts: dict[int, Autocast] = {}  # by step
        self._done = [[0] * schedule.micro_batches for _ in stages]  # forwards begun, by stage and micro-batch
        self._targets: dict[tuple[int, int], Any] = {}
        self._values: dict[Place, Value] = {}  # waiting for the forward of the place
        self._gradients: dict[Place, Gradients] = {}  # waiting for the backward of the place
        self._flights: dict[Place, Flight] = {}
        self._book = LossBook(schedule.micro_batches)

    def step(self, micro_batches: Sequence[tuple[Any, Any]]) -> list[StepLosses]:
        """Hands in one training step: per micro-batch, what the first stage reads and what the loss compares with.

        The optimizer's options of this moment are those of the step. Returns the training steps whose losses are all
        there now, which under a staggered schedule is the step before.

        Raises:
            ValueError: another number of micro-batches than the schedule's.
        """
        if len(micro_batches) != self.schedule.micro_batches:
            raise ValueError(f"one_device: got {len(micro_batches)} micro-batches, want {self.schedule.micro_batches}")
        refuse_gradients(self._optimizer)
        self._optimizer.step()  # without gradients: nothing moves, but schedulers want to have seen a step
        self._updates.begin(self._steps, options_of(self._optimizer))
        for tables in self._tables.values():
            tables.begin(self._steps, options_of(self._optimizer))
        self._autocasts[self._steps] = Autocast.now(self._device_type)
        for micro_batch, (value, target) in enumerate(micro_batches):
            self._values[self._steps, micro_batch, 0] = enter(value)
            self._targets[self._steps, micro_batch] = target
        self._steps += 1
        return self._work_off(self._agenda.next_step())

    def settle(self) -> list[StepLosses]:
        """Finishes what is in flight: the model holds the newest weights of every stage, and training is unchanged."""
        finished = self._work_off(self._agenda.rest())
        for tables in self._tables.values():
            tables.settle()
        return finished

    def drain(self) -> list[StepLosses]:
        """Settles, and lets the next step start as the first did: it reads the newest weights everywhere."""
        finished = self.settle()
        self.drains.append(self._steps)
        for weights in self._weights:
            weights.drain()
        return finished

    def _work_off(self, actions: Iterator[Due]) -> list[StepLosses]:
        for due in actions:
            with without_autocast(self._device_type):
                version = self._forward(due.place) if due.kind == "F" else self._backward(due.place)
            self._course.observe(due, version, self._flights.keys())
        return self._book.complete()

    def _forward(self, place: Place) -> int:
        step, micro_batch, j = place
        version = self.schedule.version(place, self.drains)
        last = j == self.schedule.stages - 1
        target = self._targets.pop((step, micro_batch)) if last else None
        rows = self._tables[j].visit(place, version) if j in self._tables else None
        number = self._team.place.rank * self.schedule.micro_batches + micro_batch  # among those of all ranks
        value, self._flights[place] = take_off(
            self._stages[j],
            Reads(version, self._weights[j].read(step, micro_batch, version), rows),
            self._values.pop(place),
            (self._course.seed, (step, number, j)),
            self._autocasts[step],
            loss=(lambda output: self._course.loss(output, target)) if last else None,
            keep=j not in self._course.recompute,
        )
        if last:
            self._book.enter(step, micro_batch, value.leaves[0])
        else:
            self._values[step, micro_batch, j + 1] = value
        self._done[j][micro_batch] += 1
        self._forget(j)
        return version

    def _backward(self, place: Place) -> int:
        step, micro_batch, j = place
        flight = self._flights.pop(place)
        self._weights[j].expect(step, micro_batch)
        gradients = self._gradients.pop(place) if j + 1 < self.schedule.stages else None
        landed = flight.land(gradients, self._weights[j].add)
        if j:
            self._gradients[step, micro_batch, j - 1] = landed.value
        means = self._weights[j].complete(step, micro_batch, landed.beside)
        if means is not None:
            means = self._team.mean(self._weights[j].parameters, means, j)
            self._learn(step, j, self._updates.complete(self._weights[j], step, means))
            if j in self._tables:
                self._tables[j].learn(step)
        self._forget(j)
        self._autocasts = {s: kept for s, kept in self._autocasts.items() if s >= self._updates.first_open}
        return flight.version

    def _learn(self, step: int, j: int, square: Tensor | None) -> None:
        """Notes the square of a stage's gradients; with the last stage's the norm of the step is known."""
        if square is None:
            return
        squares = self._squares.setdefault(step, {})
        squares[j] = square
        if len(squares) == self.schedule.stages:
            self._updates.know(step, square_of_step(self._squares.pop(step)))

    def _forget(self, j: int) -> None:
        """Drops the versions of a stage that no forward to come reads."""
        places = ((done, micro_batch, j) for micro_batch, done in enumerate(self._done[j]))
        oldest = min(self.schedule.version(place, self.drains) for place in places)
        self._weights[j].forget(oldest)
        if j in self._tables:
            self._tables[j].forget(oldest)
