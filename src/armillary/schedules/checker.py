"""Plays the lists of all ranks against each other: does anybody wait for ever, read what is not there, leave a letter?

Two rules by which messages move. *NCCL's*: a rank works off its sends and receives with one peer in one queue, and a
message moves only when it heads both; messages issued as a batch move together. *Gloo's*: nothing moves before its
receive is posted; the two directions of a pair are apart. In both a SEND and a RECEIVE only start something; who needs
a letter, or wants one to be over, waits. What moves can only ever let more move, so one order of play stands for all.
"""

from collections import deque
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from armillary.schedules.clipping import Clip
from armillary.schedules.instruction import Instruction, Letter
from armillary.schedules.lowering import NO_MICRO_BATCH, ranks_of_stages
from armillary.schedules.schedule import Schedule

__all__ = ["Batch", "Rule", "Setting", "flaw"]

Rule = Literal["nccl", "gloo"]
Batch = list[Instruction]  # issued together
MESSAGES = ("SEND", "RECEIVE")


@dataclass(frozen=True)
class Setting:
    """What the lists are played for. ranks: by worker of the schedule. drains: steps before which the run drained."""

    schedule: Schedule
    ranks: tuple[int, ...]
    clip: Clip | None = None
    drains: Collection[int] = ()

    @cached_property
    def top(self) -> int:
        """The last rank on the way up, who tells the norm to nobody."""
        return list(dict.fromkeys(ranks_of_stages(self.schedule, self.ranks)))[-1]


def flaw(programs: Sequence[Sequence[Instruction | Batch]], setting: Setting, rule: Rule) -> str:
    """What is wrong with the lists of all ranks; empty if nothing is.

    Raises:
        ValueError: a stage runs on several ranks.
    """
    served = {one.stage for program in programs for one in program if isinstance(one, Instruction) and one.op == "PUSH"}
    ranks = [_Rank(number, _batches(program), setting, served) for number, program in enumerate(programs)]
    pairs = [_Pair(one, other, rule) for one in ranks for other in ranks[one.number + 1 :]]
    try:
        while any([*(rank.goes_on() for rank in ranks), _goes_on_together(ranks), *(pair.moves() for pair in pairs)]):
            pass
    except _OutOfOrder as error:
        return str(error)
    found = [*(rank.trouble() for rank in ranks), *(pair.trouble() for pair in pairs), *(r.unread() for r in ranks)]
    return "; ".join(filter(None, found))


def _batches(program: Sequence[Instruction | Batch]) -> list[Batch]:
    return [[one] if isinstance(one, Instruction) else one for one in program]


class _OutOfOrder(Exception):
    """Sender and receiver name different letters."""


@dataclass(eq=False)
class _Rank:
    """
    Args of note:
        has: what was made here or has arrived, and was not read yet. gone: sent, and arrived.
        issued: messages in the order of their start, batch by batch, by peer.
        updated: optimizer steps, by stage. norms: steps whose norm is known.
    """

    number: int
    program: list[Batch]
    setting: Setting
    served: Collection[int]
    at: int = 0
    has: set[Letter] = field(default_factory=set)
    gone: set[Letter] = field(default_factory=set)
    issued: dict[int, deque[Batch]] = field(default_factory=dict)
    updated: dict[int, int] = field(default_factory=dict)
    norms: int = 0

    def goes_on(self) -> bool:
        """Whether it could carry out something by itself, and did."""
        began = self.at
        while self.at < len(self.program) and not self.wants() and self.meeting() is None:
            self.carry_out()
        return self.at > began

    def meeting(self) -> Hashable:
        """What all ranks do at once, if that is next; a reader's forward meets the others' part in its look-ups."""
        if self.at == len(self.program):
            return None
        one = self.program[self.at][0]
        if one.op == "SERVE" or (one.op == "F" and one.stage in self.served):
            return "look-up", one.place
        return ("PUSH", one.step, one.stage) if one.op == "PUSH" else None

    def wants(self) -> str:
        """What the next instructions lack; empty if nothing."""
        for one in self.program[self.at]:
            version = self.setting.schedule.version(one.place, self.setting.drains) if one.op == "F" else 0
            if one.op == "F" and self._newest(one.stage) < version:
                return f"version {version} of stage {one.stage} is missing"
            if one.op == "OVER" and one.letter not in self.gone:
                return f"{one.letter} has not arrived"
            for letter in self._read_by(one):
                if letter not in self.has:
                    return f"{letter} is missing"
        return ""

    def carry_out(self) -> None:
        batch, self.at = self.program[self.at], self.at + 1
        for one in batch:
            self.has -= set(self._read_by(one))
            self.has |= set(self._made_by(one))
            if one.op == "UPDATE":
                self.updated[one.stage] = self.updated.get(one.stage, 0) + 1
            self.norms += one.op == "KNOW" or (one.op == "NORM" and one.stage == 0)
        for peer in {one.peer for one in batch if one.op in MESSAGES}:
            together = [one for one in batch if one.op in MESSAGES and one.peer == peer]
            self.issued.setdefault(peer, deque()).append(together)

    def trouble(self) -> str:
        if self.at == len(self.program):
            return ""
        why = self.wants() or "others do not join"
        return f"rank {self.number} waits at {self.program[self.at][0]}: {why}"

    def unread(self) -> str:
        return f"rank {self.number} never reads {min(self.has)}" if self.has else ""

    def _newest(self, stage: int) -> int:
        """The version there is: stepped by UPDATE, once the norm to clip by is known."""
        clip, made = self.setting.clip, self.updated.get(stage, 0)
        return min(made, self.norms) if clip is not None and clip.waits else made

    def _read_by(self, one: Instruction) -> list[Letter]:
        """What it needs; what the user hands in is always there."""
        last = self.setting.schedule.stages - 1
        if one.op == "F" and one.stage > 0:
            return [Letter("activation", one.step, one.micro_batch, one.stage - 1)]
        if one.op == "B" and one.stage < last:
            return [Letter("activation gradient", one.step, one.micro_batch, one.stage + 1)]
        if one.op == "NORM" and one.stage < last:
            return [Letter("partial norm", one.step, NO_MICRO_BATCH, one.stage + 1)]
        return [one.letter] if one.op in ("KNOW", "SEND") and one.letter is not None else []

    def _made_by(self, one: Instruction) -> list[Letter]:
        if one.op == "F" and one.stage < self.setting.schedule.stages - 1:
            return [Letter("activation", *one.place)]
        if one.op == "B" and one.stage > 0:
            return [Letter("activation gradient", *one.place)]
        if one.op == "NORM" and one.stage > 0:
            return [Letter("partial norm", one.step, NO_MICRO_BATCH, one.stage)]
        if one.op in ("NORM", "KNOW") and self.number != self.setting.top:
            return [Letter("norm", one.step, NO_MICRO_BATCH, one.stage)]
        return []


def _goes_on_together(ranks: Sequence[_Rank]) -> bool:
    meetings = {rank.meeting() for rank in ranks}
    if len(meetings) > 1 or None in meetings or any(rank.wants() for rank in ranks):
        return False
    for rank in ranks:
        rank.carry_out()
    return True


@dataclass(frozen=True, eq=False)
class _Pair:
    """Two ranks and the messages between them."""

    one: _Rank
    other: _Rank
    rule: Rule

    def moves(self) -> bool:
        """
        Raises:
            _OutOfOrder: what is sent next is not what is wanted next.
        """
        began = len(self.one.gone) + len(self.other.gone)
        while any([self._moves(self.one, self.other), self._moves(self.other, self.one)]):
            pass
        return len(self.one.gone) + len(self.other.gone) > began

    def _moves(self, sender: _Rank, receiver: _Rank) -> bool:
        sends = [one for one in self._ahead(sender, receiver) if one.op == "SEND"]
        rooms = [one for one in self._ahead(receiver, sender) if one.op == "RECEIVE"]
        if not sends or not rooms:
            return False
        letter, wanted = sends[0].letter, rooms[0].letter
        if letter is None or letter != wanted:
            raise _OutOfOrder(f"rank {sender.number} sends {letter}, but rank {receiver.number} next wants {wanted}")
        sender.gone.add(letter)
        receiver.has.add(letter)
        _drop(sender.issued[receiver.number], sends[0])
        _drop(receiver.issued[sender.number], rooms[0])
        return True

    def _ahead(self, rank: _Rank, peer: _Rank) -> Iterator[Instruction]:
        """What may move if its other side may."""
        queue = rank.issued.get(peer.number, deque())
        for batch in list(queue)[: 1 if self.rule == "nccl" else None]:
            yield from batch

    def trouble(self) -> str:
        for rank, peer in ((self.one, self.other), (self.other, self.one)):
            for batch in rank.issued.get(peer.number, ()):
                return f"rank {rank.number}: {batch[0]} never moves"
        return ""


def _drop(queue: deque[Batch], message: Instruction) -> None:
    batch = next(batch for batch in queue if message in batch)
    batch.remove(message)
    if not batch:
        queue.remove(batch)
