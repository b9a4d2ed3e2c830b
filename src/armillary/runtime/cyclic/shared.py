"""One device of a model whose stages are shared by staggered micro-batches: N(N+1)/2 processes, N stages.

A device runs one stage for one micro-batch at a time, forward and then backward; before and after it the micro-batch is
on other devices. So a device keeps the activations of one micro-batch of one stage, where a pipeline's first process
keeps N of them; the price is that most devices wait (`Sharing.utilisation`).

Source: Fournier & Oyallon, 2024 (data and model parallelism with shared devices).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from armillary.runtime.channel import Channel
from armillary.runtime.cyclic.autocast import Autocast, without_autocast
from armillary.runtime.cyclic.delayed_step import refuse_gradients
from armillary.runtime.cyclic.passed_buffers import PassedBuffers
from armillary.runtime.cyclic.shared_stage import SharedStage
from armillary.runtime.cyclic.stage_pass import OwnLoss, Reads, StageActivation, Value, detached, forward_stage
from armillary.runtime.cyclic.step_losses import LossBook, StepLosses
from armillary.runtime.cyclic.train_spec import TrainSpec
from armillary.runtime.mailbox import Mailbox
from armillary.runtime.partition.stages import Stage
from armillary.schedules.action_queue import ActionQueue, ScheduledAction
from armillary.schedules.instruction import Letter
from armillary.schedules.norm_in_time import refuse_on_one_device
from armillary.schedules.random_stream import Stream
from armillary.schedules.schedule import Cell
from armillary.schedules.shared import Sharing

__all__ = ["Shared"]


class Shared:
    """This process's device. Every process makes the same calls.

    Args:
        stages: the model, cut; this process runs the one its rank says.
        optimizer: over the parameters of this stage or of all; it goes on to step master weights at the homes only.
        rank: this device's; its rank on the channel, too.

    Raises:
        ValueError: the schedule is not one whose stages can be shared, the model is cut otherwise, there is no such
            device, or no time for the norm to clip by.
    """

    def __init__(
        self, stages: Sequence[Stage], optimizer: Optimizer, spec: TrainSpec, channel: Channel, rank: int
    ) -> None:
        schedule = spec.schedule
        sharing = Sharing(schedule)
        if len(stages) != schedule.stages or not 0 <= rank < sharing.devices:
            raise ValueError(
                f"shared: the schedule has {schedule.stages} stages and {sharing.devices} devices; got {len(stages)} "
                f"stages, device {rank}"
            )
        refuse_on_one_device(schedule, spec.clip)  # between devices no tick is lost
        self.schedule, self.sharing, self.rank = schedule, sharing, rank
        self.part = SharedStage(stages, optimizer, spec, channel, rank)
        self.drains = self.part.drains
        self._stage = stages[self.part.index]
        self._optimizer, self._spec = optimizer, spec
        self._buffers = PassedBuffers(self._stage.module, sharing, channel, rank)
        self._device = self.part.replica.flat.device
        self._mailbox = Mailbox(channel, self._device, is_lowered=False)
        self._is_first, self._is_last = self._stage.index == 0, self._stage.index == schedule.stages - 1
        self._agenda = ActionQueue(schedule, range(schedule.workers))
        self._next = rank - sharing.ranks(self._stage.index)[0]  # micro-batch of the next forward, counted through
        self._expected = self._next  # the first one for which no room is made yet
        self._autocasts: dict[int, Autocast] = {}  # by step
        self._flights: dict[Cell, StageActivation] = {}
        self._given: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._book = LossBook(schedule.micro_batches)

    def step(self, micro_batches: Sequence[tuple[Any, Any]]) -> list[StepLosses]:
        """Hands in one training step: per micro-batch, what the first stage reads and what the last one's loss wants.

        Returns the steps whose losses are all there now (on the last stage's device; elsewhere nothing).

        Raises:
            ValueError: another number of micro-batches than the schedule's.
        """
        if len(micro_batches) != self.schedule.micro_batches:
            raise ValueError(f"shared: got {len(micro_batches)} micro-batches, want {self.schedule.micro_batches}")
        refuse_gradients(self._optimizer)
        self._optimizer.step()  # without gradients: nothing moves, but schedulers want to have seen a step
        self._autocasts[self.part.steps] = Autocast.now(self._device.type)
        for micro_batch, given in enumerate(micro_batches):
            if self._is_mine((self.part.steps, micro_batch, self._stage.index)):
                self._given[self.part.steps, micro_batch] = given
        self.part.begin()
        self._make_room(self._next)
        self._buffers.hand_in(self._handed_in)
        finished = self._work_off(self._agenda.next_step())
        self.part.close()
        return finished

    def settle(self) -> list[StepLosses]:
        """Finishes what is in flight: the stage holds its newest weights on every device; training is unchanged."""
        finished = self._work_off(self._agenda.rest())
        self.part.settle()
        self._buffers.wait()
        self._mailbox.all_over()
        return finished

    def drain(self) -> list[StepLosses]:
        """Settles, and lets the next step start as the first did: it reads the newest weights everywhere."""
        finished = self.settle()
        self.part.drain()
        return finished

    @property
    def _handed_in(self) -> int:
        """Micro-batches, of all devices."""
        return self.part.steps * self.schedule.micro_batches

    def _is_mine(self, place: Cell) -> bool:
        return self.sharing.rank_of(place) == self.rank

    def _work_off(self, actions: Iterable[ScheduledAction]) -> list[StepLosses]:
        for due in actions:
            if not self._is_mine(due.place):
                continue
            self.part.before(due.tick)
            with without_autocast(self._device.type):
                version = self._forward(due.place) if due.kind == "F" else self._backward(due.place)
            self._spec.observe(due, version, self._flights.keys())
        return self._book.complete()

    def _forward(self, place: Cell) -> int:
        step, micro_batch, j = place
        version, weights = self.part.weights(place)
        number, self._next = self._next, self._next + len(self.sharing.ranks(j))
        self._make_room(self._next)
        self._buffers.before(number)
        arrived = None if self._is_first else self._mailbox.take(Letter("activation", step, micro_batch, j - 1))
        given, target = self._given.pop((step, micro_batch))
        value, self._flights[place] = forward_stage(
            self._stage,
            Reads(version, weights),
            detached(given) if arrived is None else Value(*arrived),
            Stream(self._spec.seed, place),
            self._autocasts[step],
            loss=OwnLoss(lambda output: self._spec.loss(output, target), is_last=True) if self._is_last else None,
            keep=j not in self._spec.recompute,
        )
        self._buffers.after(number, self._handed_in)
        if self._is_last:
            self._book.enter(step, micro_batch, value.leaves[0])
        else:
            peer = self.sharing.rank_of((step, micro_batch, j + 1))
            self._mailbox.expect(Letter("activation gradient", step, micro_batch, j + 1), peer)
            self._mailbox.send(Letter("activation", *place), peer, value.leaves, value.spec)
        return version

    def _backward(self, place: Cell) -> int:
        step, micro_batch, j = place
        flight = self._flights.pop(place)
        gradients = None
        if not self._is_last:
            gradients, _ = self._mailbox.take(Letter("activation gradient", step, micro_batch, j + 1))
        self._mailbox.all_over()  # the activation's gradient came back; those sent down are a turn old
        own: dict[str, Tensor] = {}
        landed = flight.backward(gradients, own.__setitem__)
        if not self._is_first:
            peer = self.sharing.rank_of((step, micro_batch, j - 1))
            self._mailbox.send(Letter("activation gradient", *place), peer, *tree_flatten(landed.value))
        self.part.add(place, own)
        self._autocasts = {s: kept for s, kept in self._autocasts.items() if s >= step}
        return flight.version

    def _make_room(self, last: int) -> None:
        """For what this device's micro-batches up to `last`, counted through, read; as far as they are handed in."""
        count, j = self.schedule.micro_batches, self._stage.index
        while self._expected <= min(last, self._handed_in - 1):
            if not self._is_first:
                step, micro_batch = divmod(self._expected, count)
                letter = Letter("activation", step, micro_batch, j - 1)
                self._mailbox.expect(letter, self.sharing.rank_of((step, micro_batch, j - 1)))
            self._buffers.expect(self._expected)
            self._expected += len(self.sharing.ranks(j))
