"""Carries out one rank's list of instructions: forwards and backwards of the stages here, messages, optimizer steps.

Schedules differ in where a value comes from and where a gradient goes, and that stands in the list. A value that is
made here and read here waits in memory; one for another rank leaves by a message. There is no clock: instructions are
carried out in the order of the list, and each waits only for what it needs.

Where several ranks run a stage, one of them owns it: the user's optimizer steps the parameters of a stage on its owner
only, and has state there only. Parameters hold the newest weights that have come here; those of a stage whose weights
come for one action at a time hold none (`borrowed.py`).

Source: Fournier & Oyallon, 2024 (one device, pipeline, ring); Narayanan et al., 2021; Huang et al., GPipe, 2019.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from armillary.models.split_loss import Autocast, device_type_of, without_autocast
from armillary.schedules.edges import remembering, sample_keys
from armillary.schedules.instructions import NO_MICRO_BATCH, Instruction, StageMessage, operation
from armillary.schedules.lowering import Lowering, placed
from armillary.schedules.random_streams import RandomStream
from armillary.schedules.rank_list import ChannelRules
from armillary.schedules.schedule import Cell
from armillary.stages.edge_codes import CodedLetter, Crossed
from armillary.stages.optimizer_step import CorrectedStep, Updates, forget_others, options_of, refuse_gradients
from armillary.stages.partition import Stage, ties_of
from armillary.stages.reducer import StageSums, StepMeans, shared_gradients
from armillary.stages.stage_pass import (
    OwnLoss,
    Reads,
    SavedTensors,
    StageActivation,
    StageBuffers,
    Value,
    detached,
    forward_stage,
)
from armillary.stages.train_spec import LossBook, NextForwards, StageContext, StepLosses, TrainSpec, side_by_side
from armillary.stages.weights import LentBytes, StageWeights, UnshardedStage
from armillary.transport.point_to_point import AS_IT_IS, Mailbox, Writing

__all__ = ["Interpreter"]


class Interpreter:
    """Begins empty; each `step` hands in a training step and works it off as far as needs no later one.

    Every rank makes the same calls.

    Methods that take an instruction carry it out: they are what the rows of the table call, and what an instruction of
    a schedule's own file may. `activations` are those that wait for their backward, by place.

    Args:
        stages: the whole model, cut.
        optimizer: the user's; of its parameters those of the stages owned here are stepped. It loses the state of the
            others, if it has some from the beginning.
        seat: all workers of the schedule are here, if not said.

    Raises:
        ValueError: the schedule has another number of stages, runs one of them on several ranks that do not have one
            micro-batch each, or leaves no time for the norm to clip by.
    """

    def __init__(
        self, stages: Sequence[Stage], optimizer: Optimizer, spec: TrainSpec, seat: StageContext | None = None
    ) -> None:
        schedule, seat = spec.schedule, seat or side_by_side(spec.schedule)
        if len(stages) != schedule.stages:
            raise ValueError(
                f"schedule: {schedule.name} has {schedule.stages} stages, the model is cut into {len(stages)}"
            )
        self.schedule, self.drains = schedule, list[int]()
        self._optimizer, self._spec, self._seat = optimizer, spec, seat
        clip = None if spec.clip is None else spec.clip.over(schedule.stages)
        self._where = where = placed(schedule, seat.ranks)
        where.refuse_late_norm(clip)
        shared = shared_gradients(ties_of(stages))
        owners = {copy: one.owner for copy, one in shared.items()}
        buffered = [stage.index for stage in stages if any(True for _ in stage.module.buffers())]
        wires = ChannelRules(seat.one_queue, spec.codes, spec.lends, buffered, owners, spec.residency)
        reduces = seat.replicas.reduces
        self._lowering = Lowering(schedule, seat.rank, seat.ranks, clip, reduces, wires)
        self.micro_batches = list(where.handed_in(seat.rank))
        self._stages = {stage.index: stage for stage in stages if seat.rank in where.ranks(stage.index)}
        self._reducers = {j: seat.replicas.reducer(j, self._is_late(j)) for j in self._stages if seat.replicas.reduces}
        self._means = {j: self._means_of(stage) for j, stage in self._stages.items()}
        self.is_lent = self._lowering.is_lent  # some rank borrows weights; all of them know
        self.borrowed = {j: UnshardedStage(self._stages[j]) for j in self._lowering.borrowed}
        self._weights = {j: self._versions_of(stage) for j, stage in self._stages.items() if j not in self.borrowed}
        self._kept = dict.fromkeys(self._lowering.lends, 0)  # the oldest version that other ranks may still get
        flat = {j: self.borrowed[j].flat if j in self.borrowed else self._weights[j].flat for j in self._stages}
        self._sums = {
            j: StageSums(one, schedule.micro_batches // self._in_a_sum(j), shared, j) for j, one in flat.items()
        }
        self._buffers = {j: StageBuffers(self._stages[j].module) for j in self._lowering.passed & {*self._stages}}
        self._updates = Updates(list(self._weights.values()), clip, self.drains)
        forget_others(optimizer, stages, self._lowering.owned)
        own = [parameter for stage in self._stages.values() for parameter in stage.module.parameters()]
        self._device, self._device_type = own[0].device if own else torch.device("cpu"), device_type_of(own)
        self._mailbox = None if seat.channel is None else Mailbox(seat.channel, self._device, seat.one_queue)
        self._first = seat.replicas.place.rank * schedule.micro_batches  # of this replica's, among those of all
        self._crossed = Crossed(spec.seed, self._first, schedule.stages, spec.counted)
        self._remembering = remembering(spec.codes, self._stages)
        self._autocasts: dict[int, Autocast] = {}  # by step
        self._next = NextForwards(where, seat.rank, self._stages, self.micro_batches)
        self._values: dict[StageMessage, Value] = {}  # made or handed in here, still to be read or sent
        self._learning = {schedule.stages - 1, *spec.objectives} & {*self._stages}  # from a loss
        self._targets: dict[Cell, Any] = {}
        self.activations: dict[Cell, StageActivation] = {}
        self._norm = torch.zeros(())  # squared, of the last step for which it is known here
        self._book = LossBook(len(self.micro_batches))
        self.lent_bytes = LentBytes(self.beside)
        self._makes: Mapping[str, Callable[[StageMessage], Sequence[Any]]] = {  # messages of what is kept here
            "partial gradient": lambda message: self._sums[message.stage].packed(message.step),
            "gradient": lambda message: self._sums[message.stage].packed(message.step),
            "weights": lambda message: self._weights[message.stage].packed(message.step),
            "forward weights": self._to_lend,
            "backward weights": self._to_lend,
            "norm": lambda message: [self._norm],
            "buffers": lambda message: self._buffers[message.stage].packed(),
            "copy's gradient": lambda message: self._sums[message.stage].shared(message),
            "shared gradient": lambda message: self._sums[owners[message.stage]].shared(message),
        }

    def _versions_of(self, stage: Stage) -> StageWeights:
        step = CorrectedStep(self._optimizer, self.schedule, stage.index, self._spec.corrections)
        if len(self._where.ranks(stage.index)) > 1:  # they lie in a message's room, which no backward writes over
            return StageWeights(stage, step)
        return StageWeights(stage, step, self._means[stage.index].keep)

    def _means_of(self, stage: Stage) -> StepMeans:
        reducer = self._reducers.get(stage.index)
        take = None if reducer is None else reducer.put
        return StepMeans(stage.index, dict(stage.module.named_parameters()), self._in_a_sum(stage.index), take)

    def _in_a_sum(self, j: int) -> int:
        """Micro-batches whose gradients are summed as they are made; where several ranks run a stage, on the way."""
        return len(self.micro_batches) if len(self._where.ranks(j)) == 1 else 1

    def _is_here(self, place: Cell) -> bool:
        return self._where.rank_of(place) == self._seat.rank

    def _is_late(self, j: int) -> bool:
        """Whether a stage's update is wanted only when the next step's gradients are there."""
        return min(ages[j] for ages in self.schedule.staleness) > 0

    def step(self, micro_batches: Sequence[tuple[Any, Any]]) -> list[StepLosses]:
        """Hands in one training step: per micro-batch, what the first stage reads and what the last one's loss wants.

        Micro-batches are those that run here. The optimizer's options of this moment are those of the step. Returns the
        steps whose losses are all there now, on a rank of the last stage; under a staggered schedule that is the step
        before.

        Raises:
            ValueError: another number of micro-batches than the schedule's.
        """
        name, wanted = self.schedule.name, len(self.micro_batches)
        if len(micro_batches) != wanted:
            raise ValueError(f"schedule: {name} got {len(micro_batches)} micro-batches, want {wanted}")
        refuse_gradients(self._optimizer)
        self._optimizer.step()  # without gradients: nothing moves, but schedulers want to have seen a step
        step, options = self._lowering.steps, options_of(self._optimizer)
        self._autocasts = {step: kept for step, kept in self._autocasts.items() if step >= self._next.first_step}
        self._updates.begin(step, options)
        self._autocasts[step] = Autocast.now(self._device_type)
        for micro_batch, (value, target) in zip(self.micro_batches, micro_batches, strict=True):
            if self._remembering:
                self._crossed.samples[step, micro_batch] = sample_keys(value)
            if self._is_here((step, micro_batch, 0)):
                self._values[StageMessage("activation", step, micro_batch, -1)] = detached(value)
            places = filter(self._is_here, ((step, micro_batch, j) for j in self._learning))
            self._targets.update(dict.fromkeys(places, target))
        return self._carry_out(self._lowering.next_step())

    def settle(self) -> list[StepLosses]:
        """Finishes what is under way: the stages here hold their newest weights, and training is unchanged."""
        return self._carry_out(self._lowering.rest())

    def drain(self) -> list[StepLosses]:
        """Settles, and lets the next step start as the first did: it reads the newest weights everywhere."""
        finished = self._carry_out(self._lowering.drain())
        self.drains.append(self._lowering.steps)
        for weights in self._weights.values():
            weights.drain()
        return finished

    def beside(self) -> Iterator[Tensor]:
        """What is here for a time where weights are lent: those borrowed, older versions, and what is on its way."""
        if not self._lowering.is_lent:
            return
        yield from self._mailbox.held() if self._mailbox is not None else ()
        for borrowed in self.borrowed.values():
            yield from borrowed.held()
        for weights in self._weights.values():
            yield from weights.older()

    def _carry_out(self, instructions: Iterable[Instruction]) -> list[StepLosses]:
        with without_autocast(self._device_type):
            for one in instructions:
                operation(one.op).run(self, one)
        return self._book.complete()

    def forward(self, one: Instruction) -> None:
        self.lent_bytes.look()
        step, micro_batch, j = one.place
        version = self.schedule.version(one.place, self.drains)
        is_last = j == self.schedule.stages - 1
        target = self._targets.pop(one.place, None)
        loss = OwnLoss(lambda output: self._loss(j, output, target), is_last) if j in self._learning else None
        value, self.activations[one.place] = forward_stage(
            self._stages[j],
            self._read(one, version),
            self._taken(StageMessage("activation", step, micro_batch, j - 1)),
            RandomStream(self._spec.seed, (step, self._first + micro_batch, j)),
            self._autocasts[step],
            loss=loss,
            keep=j not in self._spec.recompute,
        )
        if is_last:
            self._book.enter(step, micro_batch, value.leaves[0])
        else:
            self._values[StageMessage("activation", *one.place)] = value
        self._next.begun(one.place)
        self._forget(j)
        self._spec.observe(one, version, self.activations.keys())

    def _loss(self, j: int, output: Any, target: Any) -> Tensor:
        own, whole = self._spec.objectives.get(j), self._spec.loss
        found: Tensor = whole(output, target) if own is None else own(self._stages[j].module, output, target, whole)
        return found

    def _read(self, one: Instruction, version: int) -> Reads:
        if one.stage in self.borrowed:
            borrowing = self.borrowed[one.stage].read(version)
            return Reads(version, borrowing.weights, borrowing)
        weights = self._weights[one.stage].read(one.step, one.micro_batch, version)
        apart = SavedTensors(weights.values()) if one.stage in self._spec.residency else None
        return Reads(version, weights, apart=apart)

    def backward(self, one: Instruction) -> None:
        self.lent_bytes.look()
        step, micro_batch, j = one.place
        flight, means = self.activations.pop(one.place), self._means[j]
        came = (
            None if j in self._learning else self._taken(StageMessage("activation gradient", step, micro_batch, j + 1))
        )
        gradients = None if came is None else came.leaves
        means.expect(step, self.micro_batches.index(micro_batch))
        landed = flight.backward(gradients, means.add)
        if j and j - 1 not in self.schedule.uncoupled:
            self._values[StageMessage("activation gradient", *one.place)] = Value(*tree_flatten(landed.value))
        found = means.complete(landed.beside)
        if j in self._weights:
            self._weights[j].landed(step, micro_batch)
        if found is not None:
            if j in self._reducers:
                self._reducers[j].close(step)
            else:
                self._sums[j].put(step, found)
        self._forget(j)
        self._spec.observe(one, flight.version, self.activations.keys())

    def reduce(self, one: Instruction) -> None:
        """Groups leave from now on, as their gradients become final."""
        reducer = self._reducers[one.stage]
        reducer.release(one.step)
        self._sums[one.stage].expect(one.step, partial(reducer.mean, one.step))

    def join(self, one: Instruction) -> None:
        assert one.message is not None
        self._sums[one.stage].join(one.message, self._taken(one.message).leaves)

    def update(self, one: Instruction) -> None:
        self._updates.complete(self._weights[one.stage], one.step, self._sums[one.stage].mean(one.step))
        self._forget(one.stage)

    def unshard(self, one: Instruction) -> None:
        """What comes stays, or is here for an action."""
        assert one.message is not None
        came = self._taken(one.message).leaves
        if one.stage in self.borrowed:
            self.borrowed[one.stage].arrive(one.message, came)
        else:
            self._weights[one.stage].arrive(came)
            self._forget(one.stage)

    def reshard(self, one: Instruction) -> None:
        if one.message is not None:
            self.borrowed[one.stage].let_go(one.message)
        else:
            self._kept[one.stage] = one.step + 1
            self._forget(one.stage)

    def adopt(self, one: Instruction) -> None:
        assert one.message is not None
        self._buffers[one.stage].adopt(self._taken(one.message).leaves)

    def _to_lend(self, message: StageMessage) -> Sequence[Tensor]:
        if message.stage in self.borrowed:
            return self.borrowed[message.stage].flats_for(message.what, message.version)
        return self._weights[message.stage].packed(message.version)

    def add_norm(self, one: Instruction) -> None:
        """Of the stages above and this one; with the first stage's the norm of the step is known."""
        square = self._sums[one.stage].square(one.step)
        if one.stage < self.schedule.stages - 1:
            above = self._taken(StageMessage("partial norm", one.step, NO_MICRO_BATCH, one.stage + 1))
            square = above.leaves[0] + square
        if one.stage > 0:
            message = StageMessage("partial norm", one.step, NO_MICRO_BATCH, one.stage)
            self._values[message] = Value(*tree_flatten([square.to(self._device)]))
        else:
            self._know(one, square.to(self._device))

    def learn_norm(self, one: Instruction) -> None:
        assert one.message is not None
        self._know(one, self._taken(one.message).leaves[0])

    def _know(self, one: Instruction, square: Tensor) -> None:
        self._updates.know(one.step, square)
        self._norm = square

    def send(self, one: Instruction) -> None:
        assert one.message is not None and self._mailbox is not None
        make = self._makes.get(one.message.what)
        value = self._values.pop(one.message) if make is None else Value(*tree_flatten(make(one.message)))
        self._mailbox.send(one.message, one.peer, value.leaves, value.spec, self._writing(one, value.passed_on))
        if one.stage == max(self._remembering, default=None) and one.message.what == "activation":
            del self._crossed.samples[one.message.step, one.message.micro_batch]

    def expect(self, one: Instruction) -> None:
        assert one.message is not None and self._mailbox is not None
        self._mailbox.expect(one.message, one.peer, self._writing(one))

    def _writing(self, one: Instruction, passed_on: frozenset[int] = frozenset()) -> Writing:
        """How the message's tensors are written."""
        assert one.message is not None
        return AS_IT_IS if one.code is None else CodedLetter(one.code, one.message, self._crossed, passed_on)

    def see_over(self, one: Instruction) -> None:
        assert one.message is not None and self._mailbox is not None
        self._mailbox.over(one.message)

    def _taken(self, message: StageMessage) -> Value:
        """What was made here or comes from elsewhere."""
        if message in self._values:
            return self._values.pop(message)
        assert self._mailbox is not None, f"{message} was never made"
        return Value(*self._mailbox.take(message))

    def _forget(self, j: int) -> None:
        """Drops the versions of a stage that no forward to come reads."""
        read = [self.schedule.version(place, self.drains) for place in self._next.of(j)]
        oldest = min(*read, self._kept.get(j, read[0]))
        if j in self._weights:
            self._weights[j].forget(oldest)
