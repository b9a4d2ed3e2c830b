"""Plays the lists of all ranks against each other: does anybody wait for ever, read what is not there, leave a message?

Two rules by which messages move. *NCCL's*: a rank works off its sends and receives with one peer in one queue, and a
message moves only when it heads both; messages issued as a batch move together. *Gloo's*: nothing moves before its
receive is posted; the two directions of a pair are apart. In both a SEND and a RECV only start something; who needs
a message, or wants one to be over, waits. What moves can only ever let more move, so one order of play stands for all.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from armillary.schedules.clipping import Clip
from armillary.schedules.instructions import (
    ARRIVED,
    KNOWN,
    OWN,
    TOKENS,
    VERSION,
    Holdings,
    Instruction,
    StageMessage,
    operation,
)
from armillary.schedules.schedule import Schedule

__all__ = ["Batch", "Rule", "Setting", "flaw"]

Rule = Literal["nccl", "gloo"]
Batch = list[Instruction]  # issued together
MESSAGES = ("SEND", "RECV")


@dataclass(frozen=True)
class Setting:
    """What the lists are played for. ranks: by worker of the schedule. drains: steps before which the run drained."""

    schedule: Schedule
    ranks: tuple[int, ...]
    clip: Clip | None = None
    drains: Collection[int] = ()


def flaw(programs: Sequence[Sequence[Instruction | Batch]], setting: Setting, rule: Rule) -> str:
    """What is wrong with the lists of all ranks; empty if nothing is."""
    parts = dict[StageMessage, list[int]]()
    ranks = [_rank(number, _batches(program), setting, parts) for number, program in enumerate(programs)]
    pairs = [_Pair(one, other, rule) for one in ranks for other in ranks[one.number + 1 :]]
    try:
        while any([*(rank.goes_on() for rank in ranks), *(pair.moves() for pair in pairs)]):
            pass
    except _OutOfOrder as error:
        return str(error)
    found = [*(rank.trouble() for rank in ranks), *(pair.trouble() for pair in pairs), *(r.unread() for r in ranks)]
    return "; ".join(filter(None, found))


def _batches(program: Sequence[Instruction | Batch]) -> list[Batch]:
    return [[one] if isinstance(one, Instruction) else one for one in program]


def _rank(number: int, program: list[Batch], setting: Setting, parts: dict[StageMessage, list[int]]) -> "_Rank":
    held = Holdings(setting.schedule, setting.clip, setting.drains, parts=parts)
    held.begin(one for batch in program for one in batch)
    return _Rank(number, program, held)


class _OutOfOrder(Exception):
    """Sender and receiver name different messages."""


@dataclass(eq=False)
class _Rank:
    """
    Args of note:
        issued: messages in the order of their start, batch by batch, by peer.
        moved: how many of them have left.
    """

    number: int
    program: list[Batch]
    held: Holdings
    at: int = 0
    issued: dict[int, deque[Batch]] = field(default_factory=dict)
    moved: int = 0

    def goes_on(self) -> bool:
        """Whether it could carry out something by itself, and did."""
        began = self.at
        while self.at < len(self.program) and not self.wants():
            self.carry_out()
        return self.at > began

    def wants(self) -> str:
        """What the next instructions lack; empty if nothing."""
        for one in self.program[self.at]:
            row = operation(one.op)
            needed = [*row.reads(one, self.held), *row.uses(one, self.held)]
            if missing := [thing for thing in needed if thing not in self.held.here]:
                return _said_missing(missing)
        return ""

    def carry_out(self) -> None:
        batch, self.at = self.program[self.at], self.at + 1
        for one in batch:
            self.held.carry_out(one)
        for peer in {one.peer for one in batch if one.op in MESSAGES}:
            together = [one for one in batch if one.op in MESSAGES and one.peer == peer]
            self.issued.setdefault(peer, deque()).append(together)

    def trouble(self) -> str:
        if self.at == len(self.program):
            return ""
        return f"rank {self.number} waits at {self.program[self.at][0]}: {self.wants()}"

    def unread(self) -> str:
        """The first thing that nobody uses."""
        left = sorted(thing for thing in self.held.here if thing.what not in (VERSION, KNOWN))
        for thing in sorted(left, key=lambda one: (one.what not in TOKENS.values(), one.what == OWN)):
            if thing.what in TOKENS.values():
                return f"rank {self.number} never lets go of {thing.edge}, version {thing.version}"
            if thing.what == OWN:
                return f"rank {self.number} never steps with gradients of stage {thing.stage} of step {thing.step}"
            if thing.what.startswith(ARRIVED):
                return f"rank {self.number} never waits for {thing._replace(what=thing.what.removeprefix(ARRIVED))}"
            return f"rank {self.number} never reads {thing}"
        return ""


def _said_missing(missing: Sequence[StageMessage]) -> str:
    first = missing[0]
    if first.what == OWN:
        return f"gradients of micro-batches {sorted(one.micro_batch for one in missing)} are missing"
    if first.what.startswith(ARRIVED):
        return f"{first._replace(what=first.what.removeprefix(ARRIVED))} has not arrived"
    return (
        f"version {first.version} of stage {first.stage} is missing" if first.what == VERSION else f"{first} is missing"
    )


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
        began = self.one.moved + self.other.moved
        while any([self._moves(self.one, self.other), self._moves(self.other, self.one)]):
            pass
        return self.one.moved + self.other.moved > began

    def _moves(self, sender: _Rank, receiver: _Rank) -> bool:
        sends = [one for one in self._ahead(sender, receiver) if one.op == "SEND"]
        rooms = [one for one in self._ahead(receiver, sender) if one.op == "RECV"]
        if not sends or not rooms:
            return False
        message, wanted = sends[0].message, rooms[0].message
        if message is None or message != wanted:
            raise _OutOfOrder(f"rank {sender.number} sends {message}, but rank {receiver.number} next wants {wanted}")
        sender.moved += 1
        sender.held.here.add(message._replace(what=ARRIVED + message.what))
        receiver.held.here.add(message)
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
