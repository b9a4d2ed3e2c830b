"""Plays the lists of all ranks against each other: does anybody wait for ever, read what is not there, leave a letter?

Two rules by which messages move. *NCCL's*: a rank works off its sends and receives with one peer in one queue, and a
message moves only when it heads both; messages issued as a batch move together. *Gloo's*: nothing moves before its
receive is posted; the two directions of a pair are apart. In both a SEND and a RECEIVE only start something; who needs
a letter, or wants one to be over, waits. What moves can only ever let more move, so one order of play stands for all.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from armillary.schedules.clipping import Clip
from armillary.schedules.instructions import NO_MICRO_BATCH, Instruction, Letter
from armillary.schedules.lower_zero_ring import TOKENS
from armillary.schedules.schedule import Schedule

__all__ = ["Batch", "Rule", "Setting", "flaw"]

Rule = Literal["nccl", "gloo"]
Batch = list[Instruction]  # issued together
MESSAGES = ("SEND", "RECEIVE")
MADE = ("activation", "activation gradient", "partial norm")  # by an action, for one reader
SUMS = ("partial gradient", "gradient")


@dataclass(frozen=True)
class Setting:
    """What the lists are played for. ranks: by worker of the schedule. drains: steps before which the run drained."""

    schedule: Schedule
    ranks: tuple[int, ...]
    clip: Clip | None = None
    drains: Collection[int] = ()


def flaw(programs: Sequence[Sequence[Instruction | Batch]], setting: Setting, rule: Rule) -> str:
    """What is wrong with the lists of all ranks; empty if nothing is."""
    sums = dict[Letter, set[int]]()
    ranks = [_Rank(number, _batches(program), setting, sums) for number, program in enumerate(programs)]
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


class _OutOfOrder(Exception):
    """Sender and receiver name different letters."""


@dataclass(eq=False)
class _Rank:
    """
    Args of note:
        has: what was made here or has arrived, and was not read yet. gone: sent, and arrived.
        issued: messages in the order of their start, batch by batch, by peer.
        updated: versions made or received, by stage. followed: stages whose weights come from other ranks.
        norms: steps whose norm is known.
        lent: of those that come for one action: what, version and stage. kept: oldest version still here, by stage.
        sums: micro-batches whose gradients a letter holds; those of all ranks. own: those held here, by step and stage.
    """

    number: int
    program: list[Batch]
    setting: Setting
    sums: dict[Letter, set[int]]
    at: int = 0
    has: set[Letter] = field(default_factory=set)
    gone: set[Letter] = field(default_factory=set)
    issued: dict[int, deque[Batch]] = field(default_factory=dict)
    updated: dict[int, int] = field(default_factory=dict)
    followed: set[int] = field(default_factory=set)
    lent: set[tuple[str, int, int]] = field(default_factory=set)
    kept: dict[int, int] = field(default_factory=dict)
    norms: int = 0
    own: dict[tuple[int, int], set[int]] = field(default_factory=dict)

    def goes_on(self) -> bool:
        """Whether it could carry out something by itself, and did."""
        began = self.at
        while self.at < len(self.program) and not self.wants():
            self.carry_out()
        return self.at > began

    def wants(self) -> str:
        """What the next instructions lack; empty if nothing."""
        for one in self.program[self.at]:
            if one.op in ("F", "B") and (missing := self._unread(one)):
                return missing
            if one.op == "OVER" and one.letter not in self.gone:
                return f"{one.letter} has not arrived"
            if (letter := self._read_by(one)) is not None and letter not in self.has:
                return f"{letter} is missing"
            if lacking := self._lacks(one):
                return lacking
        return ""

    def carry_out(self) -> None:
        batch, self.at = self.program[self.at], self.at + 1
        for one in batch:
            if (read := self._read_by(one)) is not None:
                self.has.discard(read)
            if (made := self._made_by(one)) is not None:
                self.has.add(made)
            self._follow_weights(one)
            self.norms += one.op == "KNOW" or (one.op == "NORM" and one.stage == 0)
            self._add(one)
        for peer in {one.peer for one in batch if one.op in MESSAGES}:
            together = [one for one in batch if one.op in MESSAGES and one.peer == peer]
            self.issued.setdefault(peer, deque()).append(together)

    def _follow_weights(self, one: Instruction) -> None:
        if one.letter is not None and one.letter.what in TOKENS.values() and one.op in ("UNSHARD", "RESHARD"):
            (self.lent.add if one.op == "UNSHARD" else self.lent.discard)(_token(one.letter))
        elif one.op in ("UPDATE", "UNSHARD"):
            self.updated[one.stage] = self.updated.get(one.stage, 0) + 1
        elif one.op == "RESHARD":
            self.kept[one.stage] = one.step + 1
        if one.op == "UNSHARD":
            self.followed.add(one.stage)

    @cached_property
    def _borrowed(self) -> set[int]:
        """Stages whose weights come for one action."""
        each = (one for batch in self.program for one in batch if one.op == "UNSHARD" and one.letter is not None)
        return {one.stage for one in each if one.letter is not None and one.letter.what in TOKENS.values()}

    def _unread(self, one: Instruction) -> str:
        """Of the weights that an action reads."""
        version = self.setting.schedule.version(one.place, self.setting.drains)
        if one.stage in self._borrowed:
            is_there = (TOKENS["F" if one.op == "F" else "B"], version, one.stage) in self.lent
        else:
            is_there = one.op == "B" or self.kept.get(one.stage, 0) <= version <= self._newest(one.stage)
        return "" if is_there else f"version {version} of stage {one.stage} is missing"

    def _lacks(self, one: Instruction) -> str:
        """What is sent or stepped with must be there, and whole."""
        if one.op == "UPDATE":
            missing = {*range(self.setting.schedule.micro_batches)} - self.own.get((one.step, one.stage), set())
            return f"gradients of micro-batches {sorted(missing)} are missing" if missing else ""
        if one.op != "SEND" or one.letter is None:
            return ""
        letter = one.letter
        if letter.what in SUMS and (letter.step, letter.stage) not in self.own:
            return f"{letter} is missing"
        if letter.what == "weights" and self._newest(letter.stage) != letter.step:
            return f"version {letter.step} of stage {letter.stage} is not the newest"
        if letter.what in TOKENS.values():
            what, version, stage = token = _token(letter)
            is_here = self.kept.get(stage, 0) <= version <= self._newest(stage)
            if (token not in self.lent) if stage in self._borrowed else not is_here:
                return f"version {version} of stage {stage} is not here to be lent as {what}"
        return f"{letter} is not known" if letter.what == "norm" and self.norms <= letter.step else ""

    def _add(self, one: Instruction) -> None:
        """Follows the gradients, sum by sum."""
        key = one.step, one.stage
        if one.op == "B":
            self.own.setdefault(key, set()).add(one.micro_batch)
        elif one.op == "SUM" and one.letter is not None:
            self.own.setdefault(key, set()).update(self.sums.pop(one.letter))
        elif one.op == "UPDATE":
            del self.own[key]
        elif one.op == "SEND" and one.letter is not None and one.letter.what in SUMS:
            self.sums[one.letter] = self.own.pop(key)

    def trouble(self) -> str:
        if self.at == len(self.program):
            return ""
        return f"rank {self.number} waits at {self.program[self.at][0]}: {self.wants()}"

    def unread(self) -> str:
        if self.lent:
            what, version, stage = min(self.lent)
            return f"rank {self.number} never lets go of {what} of stage {stage}, version {version}"
        if self.has:
            return f"rank {self.number} never reads {min(self.has)}"
        kept = [f"{stage} of step {step}" for step, stage in sorted(self.own)]
        return f"rank {self.number} never steps with gradients of stage {kept[0]}" if kept else ""

    def _newest(self, stage: int) -> int:
        """The version there is: stepped by UPDATE, once the norm to clip by is known."""
        clip, made = self.setting.clip, self.updated.get(stage, 0)
        is_made_here = clip is not None and clip.waits and stage not in self.followed
        return min(made, self.norms) if is_made_here else made

    def _read_by(self, one: Instruction) -> Letter | None:
        """What it needs; what the user hands in is always there, and what a rank keeps is looked for in `_lacks`."""
        is_alone = one.op == "B" and one.stage in self.setting.schedule.uncoupled
        letter = one.letter if one.op == "SEND" else None if is_alone else one.reads
        if letter is None or not 0 <= letter.stage < self.setting.schedule.stages:
            return None
        return letter if one.op != "SEND" or letter.what in MADE else None

    def _made_by(self, one: Instruction) -> Letter | None:
        if one.op == "F" and one.stage < self.setting.schedule.stages - 1:
            return Letter("activation", *one.place)
        if one.op == "B" and one.stage > 0 and one.stage - 1 not in self.setting.schedule.uncoupled:
            return Letter("activation gradient", *one.place)
        if one.op == "NORM" and one.stage > 0:
            return Letter("partial norm", one.step, NO_MICRO_BATCH, one.stage)
        return None


def _token(letter: Letter) -> tuple[str, int, int]:
    return letter.what, letter.version, letter.stage


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
