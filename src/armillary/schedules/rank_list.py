"""One rank's list of instructions as it is written: which messages it needs room for, has sent, and may let go.

Note [Early room]. Nothing moves before there is room for it, so room is made before the sender's place in the order:
then a message can move while its receiver computes, however far ahead the sender is. Where both ways of a pair are
one queue (NCCL), up to the message before it. Where each has a lane of its own (gloo), as early as it is certain: what
goes up at the beginning of the call, a gradient when its own forward is done.

A message is waited for (`WAIT_SEND`) when it has certainly arrived: an activation when its gradient has come, others
some actions after the one that needed them, by the clock. At the latest before that of the next step leaves: weights
and sums are as large as a stage, so one of each is on its way at a time, however seldom a rank acts.

Where room is short neither holds: what is on its way takes memory on both sides. Room is made where a message leaves,
and the sender lets go of it with its first action after the one that needed it.

Beside it: the actions that are still to be done (`ActionQueue`). Steps overlap: some of a step's backwards come after
forwards of the next. Within a tick backwards come before forwards, so that memory is freed first, then workers in
order, so that gradients are summed in worker order. And which rank runs what, and what crosses because of it
(`Placement`): mostly a worker of a schedule is a rank, or all of them are one; a schedule's file may place them
otherwise, and nobody who lowers or carries out a schedule asks which placement it is.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from armillary.schedules.clipping import Clip
from armillary.schedules.edges import Codes
from armillary.schedules.instructions import Instruction, StageMessage
from armillary.schedules.schedule import Cell, Kind, Schedule

__all__ = [
    "ONE_QUEUE",
    "ActionQueue",
    "ChannelRules",
    "Communication",
    "InstructionWriter",
    "Placement",
    "Ranks",
    "Residency",
    "ScheduledAction",
    "Ties",
    "WorkerWriter",
]

Ties = Mapping[int, int]  # by stage that holds copies of parameters, the stage that owns them

PATIENCE = 4  # actions of a rank between what needed a message of its and the wait for it


class Residency(NamedTuple):
    """What is done with a stage's activations between forward and backward, by two instructions around the time in
    which nobody reads them. name: as the stage table of a plan has it."""

    name: str
    after_forward: str
    before_backward: str


@dataclass(frozen=True)
class ChannelRules:
    """How messages travel, and what else is written around the actions of a schedule.

    Args:
        one_queue: whether both directions of a pair share one; see Note [Early room].
        codes: of edges that are coded.
        lends: whether only the owner of a stage keeps its weights, where several ranks run it. Room is short then.
        buffered: stages whose buffers travel, where micro-batches take turns on ranks.
        ties: stages that share parameters.
        residency: of stages whose activations do not just stay.
    """

    one_queue: bool = True
    codes: Codes = field(default_factory=dict)
    lends: bool = False
    buffered: Collection[int] = ()
    ties: Ties = field(default_factory=dict)
    residency: Mapping[int, Residency] = field(default_factory=dict)


ONE_QUEUE = ChannelRules()


class InstructionWriter:
    def __init__(self, rank: int, wires: ChannelRules) -> None:
        self.rank, self.wires = rank, wires
        self._list: list[Instruction] = []
        # Of WAIT_SEND: since this rank's last action, since the one before ...
        self._needed: deque[list[Instruction]] = deque([[]])

    def begin(self) -> None:
        """An action of this rank comes next."""
        self._needed.appendleft([])
        while len(self._needed) > (1 if self.wires.lends else PATIENCE):
            self._list += self._needed.pop()

    def add(self, instruction: Instruction) -> None:
        """One of this rank's."""
        self._list.append(instruction)

    def act(self, due: "ScheduledAction") -> None:
        """An action of this rank, with what its stage's residency puts around it."""
        one = Instruction(due.kind, due.tick, due.step, due.micro_batch, due.stage)
        apart = self.wires.residency.get(due.stage)
        if apart is not None and due.kind == "B":
            self._list.append(one._replace(op=apart.before_backward))
        self._list.append(one)
        if apart is not None and due.kind == "F":
            self._list.append(one._replace(op=apart.after_forward))

    def over(self, message: StageMessage, peer: int, tick: int) -> None:
        """This rank waits for a message of its own, now."""
        self._list.append(_of_message("WAIT_SEND", tick, message, peer))

    def passes(self, message: StageMessage, sender: int, receiver: int, tick: int) -> None:
        """A message is there; it leaves if somebody else reads it."""
        if sender != receiver and self.rank in (sender, receiver):
            if self.rank == sender:
                self._see_over_those_before(message, receiver)
            op = "SEND" if self.rank == sender else "RECV"
            peer = receiver if self.rank == sender else sender
            code = self.wires.codes.get((message.what, message.stage))
            self._list.append(_of_message(op, tick, message, peer)._replace(code=code))

    def _see_over_those_before(self, message: StageMessage, peer: int) -> None:
        """Letters of this edge of earlier steps, which were needed."""
        for needed in self._needed:
            before = [one for one in needed if one.peer == peer and _is_before(one.message, message)]
            self._list += before
            needed[:] = [one for one in needed if one not in before]

    def reads(self, message: StageMessage, sender: int, receiver: int, tick: int) -> None:
        """An action needs a message: whoever sent it knows that it has arrived."""
        if sender != receiver and self.rank == sender:
            self._needed[0].append(_of_message("WAIT_SEND", tick, message, receiver))

    def see_all_over(self) -> None:
        """Everything sent so far is waited for."""
        for needed in reversed(self._needed):
            self._list += needed
        self._needed = deque([[]])

    def taken(self) -> list[Instruction]:
        """What was written since the last call."""
        taken, self._list = self._list, []
        return taken if self.wires.lends else _with_early_room(taken, self.wires.one_queue)


def _is_before(other: StageMessage | None, message: StageMessage) -> bool:
    """Whether it goes by the same edge, for an earlier step."""
    return (
        other is not None and (other.what, other.stage) == (message.what, message.stage) and other.step < message.step
    )


def _of_message(op: str, tick: int, message: StageMessage, peer: int) -> Instruction:
    return Instruction(op, tick, message.step, message.micro_batch, message.stage, message, peer)


def _with_early_room(instructions: Iterable[Instruction], one_queue: bool) -> list[Instruction]:
    """See Note [Early room]."""
    found: list[Instruction] = []
    for one in instructions:
        if one.op != "RECV":
            found.append(one)
            continue
        before = (at for at in reversed(range(len(found))) if _comes_before(found[at], one, one_queue))
        found.insert(next(before, -1) + 1, one)
    return found


def _comes_before(other: Instruction, receive: Instruction, one_queue: bool) -> bool:
    if other.peer == receive.peer and (other.op == "RECV" or (other.op == "SEND" and one_queue)):
        return True
    is_gradient = receive.message is not None and receive.message.what == "activation gradient"
    return is_gradient and other.op == "F" and other.place == (receive.step, receive.micro_batch, receive.stage - 1)


class ScheduledAction(NamedTuple):
    """An action of a certain step; sorts in the order of execution."""

    tick: int
    turn: int  # 0 for backwards, 1 for forwards
    worker: int
    step: int
    micro_batch: int
    stage: int

    @property
    def kind(self) -> Kind:
        return "F" if self.turn else "B"

    @property
    def place(self) -> Cell:
        return self.step, self.micro_batch, self.stage


class ActionQueue:
    """The actions of some workers of a schedule, step by step.

    Args:
        in_step_with: a step ends where theirs does; where the workers themselves end it, if not said.
    """

    def __init__(self, schedule: Schedule, workers: Collection[int], in_step_with: Collection[int] = ()) -> None:
        self._schedule, self._workers = schedule, sorted(workers)
        self._waiting: list[ScheduledAction] = []
        self._steps = 0
        self._first = min(row[0].start for worker in in_step_with or workers if (row := schedule.ticks[worker]))

    def next_step(self) -> Iterator[ScheduledAction]:
        """Adds one step and yields what is due before the step after it begins."""
        for worker in self._workers:
            for action in self._schedule.ticks[worker]:
                tick = action.start + self._steps * self._schedule.period
                turn = int(action.kind == "F")
                heapq.heappush(
                    self._waiting, ScheduledAction(tick, turn, worker, self._steps, action.micro_batch, action.stage)
                )
        self._steps += 1
        yield from self._until(self._first + self._steps * self._schedule.period)

    def rest(self) -> Iterator[ScheduledAction]:
        """Yields all that is left of the steps added so far."""
        yield from self._until(None)

    def _until(self, tick: int | None) -> Iterator[ScheduledAction]:
        while self._waiting and (tick is None or self._waiting[0].tick < tick):
            yield heapq.heappop(self._waiting)


class WorkerWriter:
    """
    Args:
        ranks: by worker of the schedule.
    """

    def __init__(self, ranks: Sequence[int], written: InstructionWriter) -> None:
        self._ranks, self._written = ranks, written

    def is_here(self, worker: int) -> bool:
        return self._ranks[worker] == self._written.rank

    def does(self, worker: int, instruction: Instruction) -> None:
        """Something by itself."""
        if self.is_here(worker):
            self._written.add(instruction)

    def takes(self, op: str, worker: int, tick: int, message: StageMessage, sender: int) -> None:
        """Something with a message that has come."""
        place = message.step, message.micro_batch, message.stage
        self.does(worker, Instruction(op, tick, *place, message, self._ranks[sender]))
        self._written.reads(message, self._ranks[sender], self._ranks[worker], tick)

    def passes(self, message: StageMessage, sender: int, receiver: int, tick: int) -> None:
        self._written.passes(message, self._ranks[sender], self._ranks[receiver], tick)


class Communication(Protocol):
    """What one rank does around actions: messages, sums, optimizer steps. Told of every action, in the one order."""

    @property
    def owned(self) -> frozenset[int]:
        """The stages whose optimizer steps on this rank."""

    @property
    def passed(self) -> frozenset[int]:
        """The stages whose buffers go from rank to rank."""

    def begin_step(self, step: int) -> None:
        """One more step is handed in."""

    def before(self, due: ScheduledAction) -> None:
        """What an action needs."""

    def after(self, due: ScheduledAction) -> None:
        """What the action has made."""

    def end_step(self, steps: int) -> None:
        """So many steps were handed in, and all that can be done without a later one."""

    def rest(self, steps: int, tick: int) -> None:
        """All actions are done: every owner makes the newest weights."""

    def drain(self, steps: int, tick: int) -> None:
        """After that: the next step begins with them."""


class Placement(Protocol):
    def rank_of(self, place: Cell) -> int:
        """The rank that runs this stage for this micro-batch of this step, both ways."""

    def ranks(self, stage: int) -> Sequence[int]:
        """Those that run a stage."""

    def owner(self, stage: int) -> int:
        """The one of them that has the stage's optimizer state and newest weights."""

    def older(self, stage: int) -> int:
        """How many older versions of its weights they hold, all together."""

    def handed_in(self, rank: int) -> Sequence[int]:
        """The micro-batches of a step that are handed in on a rank."""

    def rotation(self, stage: int) -> int:
        """After how many steps the micro-batches of a step meet the same ranks again."""

    def around(self, clip: Clip | None, written: InstructionWriter, reduces: bool) -> Communication:
        """
        Args:
            written: the list of the rank in question.
            reduces: whether gradients are averaged over the ranks that hold the same stages, with data of their own.
        """

    def refuse_late_norm(self, clip: Clip | None) -> None:
        """
        Raises:
            ValueError: weights are read before the norm can be known where they are made.
        """


Ranks = Sequence[int] | Placement  # by worker of the schedule, where each stays on its rank
