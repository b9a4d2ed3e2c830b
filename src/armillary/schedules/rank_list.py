"""One rank's list of instructions as it is written, and which letters it needs room for, has sent, and may let go.

Note [Early room]. Nothing moves before there is room for it, so room is made before the sender's place in the order:
then a letter can move while its receiver computes, however far the sender is ahead. Where both directions of a pair are
one queue (NCCL), up to the message before it. Where each has a lane of its own (gloo), as early as it is certain: what
goes up at the beginning of the call, a gradient when its own forward is done.

A letter is waited for (`OVER`) when it has certainly arrived: an activation when its gradient has come back, others
some actions after the one that needed them, by the clock. At the latest before that of the next step leaves: weights
and sums are as large as a stage, so one of each is on its way at a time, however seldom a rank acts.

Where room is short neither holds: what is on its way takes memory on both sides. Room is made where a letter leaves,
and the sender lets go of it with its first action after the one that needed it.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from armillary.schedules.edge import Codes
from armillary.schedules.instruction import Instruction, Letter, Op

__all__ = ["ONE_QUEUE", "RankList", "Ties", "Wires"]

Ties = Mapping[int, int]  # by stage that holds copies of parameters, the stage that owns them

PATIENCE = 4  # actions of a rank between what needed a letter of its and the wait for it


@dataclass(frozen=True)
class Wires:
    """How letters travel.

    Args:
        one_queue: whether both directions of a pair share one; see Note [Early room].
        codes: of edges that are coded.
        lends: whether only the owner of a stage keeps its weights, where several ranks run it. Room is short then.
        buffered: stages whose buffers travel, where micro-batches take turns on ranks.
        ties: stages that share parameters.
    """

    one_queue: bool = True
    codes: Codes = field(default_factory=dict)
    lends: bool = False
    buffered: Collection[int] = ()
    ties: Ties = field(default_factory=dict)


ONE_QUEUE = Wires()


class RankList:
    def __init__(self, rank: int, wires: Wires) -> None:
        self.rank, self.wires = rank, wires
        self._list: list[Instruction] = []
        self._needed: deque[list[Instruction]] = deque([[]])  # OVER, since this rank's last action, the one before ...

    def begin(self) -> None:
        """An action of this rank comes next."""
        self._needed.appendleft([])
        while len(self._needed) > (1 if self.wires.lends else PATIENCE):
            self._list += self._needed.pop()

    def add(self, instruction: Instruction) -> None:
        """One of this rank's."""
        self._list.append(instruction)

    def over(self, letter: Letter, peer: int, tick: int) -> None:
        """This rank waits for a letter of its own, now."""
        self._list.append(_of_letter("OVER", tick, letter, peer))

    def passes(self, letter: Letter, sender: int, receiver: int, tick: int) -> None:
        """A letter is there; it leaves if somebody else reads it."""
        if sender != receiver and self.rank in (sender, receiver):
            if self.rank == sender:
                self._see_over_those_before(letter, receiver)
            op: Op = "SEND" if self.rank == sender else "RECEIVE"
            peer = receiver if self.rank == sender else sender
            code = self.wires.codes.get((letter.what, letter.stage))
            self._list.append(_of_letter(op, tick, letter, peer)._replace(code=code))

    def _see_over_those_before(self, letter: Letter, peer: int) -> None:
        """Letters of this edge of earlier steps, which were needed."""
        for needed in self._needed:
            before = [one for one in needed if one.peer == peer and _is_before(one.letter, letter)]
            self._list += before
            needed[:] = [one for one in needed if one not in before]

    def reads(self, letter: Letter, sender: int, receiver: int, tick: int) -> None:
        """An action needs a letter: whoever sent it knows that it has arrived."""
        if sender != receiver and self.rank == sender:
            self._needed[0].append(_of_letter("OVER", tick, letter, receiver))

    def see_all_over(self) -> None:
        """Everything sent so far is waited for."""
        for needed in reversed(self._needed):
            self._list += needed
        self._needed = deque([[]])

    def taken(self) -> list[Instruction]:
        """What was written since the last call."""
        taken, self._list = self._list, []
        return taken if self.wires.lends else _with_early_room(taken, self.wires.one_queue)


def _is_before(other: Letter | None, letter: Letter) -> bool:
    """Whether it goes by the same edge, for an earlier step."""
    return other is not None and (other.what, other.stage) == (letter.what, letter.stage) and other.step < letter.step


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
