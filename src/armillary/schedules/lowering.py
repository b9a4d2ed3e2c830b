"""A schedule lowered to one rank's list of instructions, call by call: a step handed in, or the rest worked off.

Note [One order]. All ranks walk through the same actions of all workers, in the order of the schedule's clock
(`Agenda`). A rank's list is what of that concerns it; room for a letter is made where its sender sends it. So two ranks
name their sends and receives in one and the same order, both directions together: a queue that NCCL can carry as it
stands. What an action waits for has an earlier place in that order, so nobody waits in a circle, whichever rules a
message moves by. A step ends at the same tick for all, so that a rank that leaves a call has left nobody waiting in it.

Note [Early room]. Nothing moves before there is room for it, so room is made before the sender's place in the order:
then a letter can move while its receiver computes, however far the sender is ahead. Where both directions of a pair are
one queue (NCCL), up to the message before it. Where each has a lane of its own (gloo), as early as it is certain: what
goes up at the beginning of the call, a gradient when its own forward is done.

A letter is waited for (`OVER`) when it has certainly arrived: an activation when its gradient has come back, others
some actions after the one that needed them, by the clock.

Note [Norms]. Where gradients are clipped by a norm over all stages, a stage adds its square to that of the stages
above, behind the last gradient of the step. The whole goes up again rank by rank, each ahead of the forward of the
micro-batch that `messages.carrier` names.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from armillary.schedules.agenda import Agenda, Due
from armillary.schedules.instruction import Instruction, Letter, Op
from armillary.schedules.messages import carrier, workers_of_stages
from armillary.schedules.schedule import Schedule

__all__ = ["Lowering", "ranks_of_stages"]

NO_MICRO_BATCH = -1
PATIENCE = 4  # actions of a rank between what needed a letter of its and the wait for it


def ranks_of_stages(schedule: Schedule, ranks: Sequence[int]) -> tuple[int, ...]:
    """The rank that holds each stage.

    Args:
        ranks: by worker of the schedule.

    Raises:
        ValueError: a stage runs on several ranks.
    """
    if len(set(ranks)) == 1:
        return (ranks[0],) * schedule.stages
    return tuple(ranks[worker] for worker in workers_of_stages(schedule))


class Lowering:
    """
    Args:
        rank: whose list. ranks: by worker of the schedule.
        has_norms: whether squares of stages travel, see Note [Norms].
        served: stages whose row-sharded tables are spread over all ranks.
        replicas: ranks that hold the same stages, with data of their own.
        one_queue: whether both directions of a pair share one; see Note [Early room].
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        ranks: Sequence[int],
        has_norms: bool = False,
        served: Collection[int] = (),
        replicas: int = 1,
        one_queue: bool = True,
    ) -> None:
        self.schedule, self.rank, self.steps = schedule, rank, 0
        self._workers, self._stages = tuple(ranks), ranks_of_stages(schedule, ranks)
        self._path = tuple(dict.fromkeys(self._stages))  # on which a norm goes up
        self._lowest = {one: self._stages.index(one) for one in self._path}
        self._has_norms, self._served, self._replicas = has_norms, frozenset(served), replicas
        self._carrier = carrier(schedule) if has_norms else 0
        self._known = [0] * len(self._path)  # steps whose norm is known, by place on the path
        self._agenda = Agenda(schedule, range(schedule.workers))
        self._list: list[Instruction] = []
        self._one_queue = one_queue
        self._needed: deque[list[Instruction]] = deque([[]])  # OVER, since this rank's last action, the one before ...

    def next_step(self) -> list[Instruction]:
        """What is to be done when one more step is handed in."""
        self.steps += 1
        for due in self._agenda.next_step():
            self._walk(due)
        return self._taken()

    def rest(self) -> list[Instruction]:
        """What is left of the steps handed in so far."""
        for due in self._agenda.rest():
            self._walk(due)
        end = self.steps * self.schedule.period
        for place in range(1, len(self._path) if self._has_norms else 0):
            while self._known[place] < self.steps:
                self._know(place, end)
        for needed in reversed(self._needed):
            self._list += needed
        self._needed = deque([[]])
        return self._taken()

    def _taken(self) -> list[Instruction]:
        taken, self._list = _with_early_room(self._list, self._one_queue), []
        return taken

    def _walk(self, due: Due) -> None:
        """One action of any worker."""
        owner, j = self._workers[due.worker], due.stage
        if due.kind == "F" and j == self._lowest[owner]:
            self._learn(due)
        before, after = (j - 1, j + 1) if due.kind == "F" else (j + 1, j - 1)
        if owner == self.rank:
            self._needed.appendleft([])
            while len(self._needed) > PATIENCE:
                self._list += self._needed.pop()
            self._do(due.kind, due)
            if due.kind == "B" and j + 1 < self.schedule.stages and self._stages[j + 1] != owner:
                gone = Letter("activation", due.step, due.micro_batch, j)
                self._list.append(_of_letter("OVER", due.tick, gone, self._stages[j + 1]))
        elif j in self._served and due.kind == "F":
            self._do("SERVE", due)
        if 0 <= before < self.schedule.stages:
            self._reads(self._letter(due, before), self._stages[before], owner, due.tick)
        if 0 <= after < self.schedule.stages:
            self._passes(self._letter(due, j), owner, self._stages[after], due.tick)
        if due.kind == "B" and due.micro_batch == self.schedule.micro_batches - 1:
            self._finish(due, owner)

    @staticmethod
    def _letter(due: Due, stage: int) -> Letter:
        return Letter("activation" if due.kind == "F" else "activation gradient", due.step, due.micro_batch, stage)

    def _finish(self, due: Due, owner: int) -> None:
        """A stage has all its gradients of a step."""
        j = due.stage
        if owner == self.rank:
            if self._replicas > 1:
                self._do("REDUCE", due)
            self._do("UPDATE", due)
        if self._has_norms:
            above, own = (Letter("partial norm", due.step, NO_MICRO_BATCH, stage) for stage in (j + 1, j))
            if owner == self.rank:
                self._do("NORM", due)
            if j + 1 < self.schedule.stages:
                self._reads(above, self._stages[j + 1], owner, due.tick)
            if j > 0:
                self._passes(own, owner, self._stages[j - 1], due.tick)
            else:
                self._known[0] += 1
                self._pass_up(0, due.step, due.tick)
        if j in self._served:
            self._do("PUSH", due)

    def _learn(self, due: Due) -> None:
        """The norms that a rank knows before this forward; see Note [Norms]."""
        place = self._path.index(self._workers[due.worker])
        if self._has_norms and place > 0:
            wanted = due.step + (due.micro_batch - self._carrier) // self.schedule.micro_batches
            while self._known[place] < wanted:
                self._know(place, due.tick)

    def _know(self, place: int, tick: int) -> None:
        step, sender, reader = self._known[place], self._path[place - 1], self._path[place]
        letter = Letter("norm", step, NO_MICRO_BATCH, self._lowest[sender])
        self._known[place] += 1
        if reader == self.rank:
            self._list.append(Instruction("KNOW", tick, step, NO_MICRO_BATCH, self._lowest[reader], letter, sender))
        self._reads(letter, sender, reader, tick)
        self._pass_up(place, step, tick)

    def _pass_up(self, place: int, step: int, tick: int) -> None:
        if place + 1 < len(self._path):
            letter = Letter("norm", step, NO_MICRO_BATCH, self._lowest[self._path[place]])
            self._passes(letter, self._path[place], self._path[place + 1], tick)

    def _do(self, op: Op, due: Due) -> None:
        self._list.append(Instruction(op, due.tick, due.step, due.micro_batch, due.stage))

    def _passes(self, letter: Letter, sender: int, receiver: int, tick: int) -> None:
        """A letter is there; it leaves if somebody else reads it."""
        if sender != receiver and self.rank in (sender, receiver):
            op: Op = "SEND" if self.rank == sender else "RECEIVE"
            peer = receiver if self.rank == sender else sender
            self._list.append(_of_letter(op, tick, letter, peer))

    def _reads(self, letter: Letter, sender: int, receiver: int, tick: int) -> None:
        """An action needs a letter: whoever sent it knows that it has arrived."""
        if sender != receiver and self.rank == sender and letter.what != "activation":
            self._needed[0].append(_of_letter("OVER", tick, letter, receiver))


def _of_letter(op: Op, tick: int, letter: Letter, peer: int) -> Instruction:
    return Instruction(op, tick, letter.step, letter.micro_batch, letter.stage, letter, peer)


def _with_early_room(instructions: Iterable[Instruction], one_queue: bool) -> list[Instruction]:
    """See Note [Early room]."""
    found: list[Instruction] = []
    for one in instructions:
        if one.op != "RECEIVE":
            found.append(one)
            continue
        before = (at for at in reversed(range(len(found))) if _comes_before(found[at], one, one_queue))
        found.insert(next(before, -1) + 1, one)
    return found


def _comes_before(other: Instruction, receive: Instruction, one_queue: bool) -> bool:
    if other.peer == receive.peer and (other.op == "RECEIVE" or (other.op == "SEND" and one_queue)):
        return True
    is_gradient = receive.letter is not None and receive.letter.what == "activation gradient"
    return is_gradient and other.op == "F" and other.place == (receive.step, receive.micro_batch, receive.stage - 1)
