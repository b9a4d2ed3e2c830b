"""Weights that only their owner keeps: lent for one action, handed on, and given back.

A worker gets the weights of a stage before its forward (`UNSHARD`), and once more before its backward. It sends them on
when the next one needs them, and lets go of them (`RESHARD`) when they were used and have been sent. The owner keeps a
version until the last that is lent of it has left, and its own backward is done. See `unsharded.py`.

Some of a step's tokens leave before the step begins. If the run drains first, they are thrown away: the step reads
newer weights than they are, and its owner sends them anew.

Who lends whom the weights of a stage, and when, where only its owner keeps them; and what crosses in a step.

Weights travel twice a step: one token of a stage serves the forwards, one the backwards. Each goes from the owner
through the workers in the order in which they use it, and is dropped once it was used and has been sent on. A token
leaves a hop's time before it is needed, or when the sender has it: until then its room is needed once only.

Note [A hop's time]. As long as a mean stage takes both ways, and never more than the uniform delay.

Note [Crossing]. A token may be used in one step and sent on for the next. In the first step, and after a drain, the
worker before on the way has not had it, or had what nobody reads any more: there the owner sends it directly.

Source: Fournier & Oyallon, 2024 (ZeRO mode); WeiPipe (2025) for two tokens. Departures: the owner is the first worker
that can read new weights, which saves a hop and spreads states evenly; slack.
"""

import heapq
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from armillary.schedules.clipping import Clip
from armillary.schedules.instructions import TOKENS, Instruction, StageMessage
from armillary.schedules.rank_list import ScheduledAction, WorkerWriter
from armillary.schedules.routes import closing, weight_path
from armillary.schedules.schedule import Cell, Kind, Schedule

__all__ = ["LentWeights", "Unshard", "hop_ticks", "unshards"]


class Unshard(NamedTuple):
    """One token's way from one worker to the next, in every step.

    leaves, used: ticks, counted in the receiver's step.
    crosses: how many steps of its own before the receiver's the sender used it; of an owner 0.
    """

    leaves: int
    used: int
    kind: Kind
    stage: int
    sender: int
    receiver: int
    crosses: int


def hop_ticks(schedule: Schedule) -> int:
    """See Note [A hop's time]."""
    return max(1, schedule.period // max(schedule.workers, schedule.stages))


def unshards(schedule: Schedule, stage: int, clip: Clip | None = None) -> Iterator[Unshard]:
    """Of one stage.

    Raises:
        ValueError: weights more than one step old, or workers that form no ring.
    """
    if max(map(max, schedule.staleness)) > 1:
        raise ValueError(f"schedule: {schedule.name} reads weights more than one step old; want at most one to lend")
    way, made = weight_path(schedule, stage), closing(schedule, stage, clip).tick
    ages = [schedule.staleness[worker][stage] for worker in range(schedule.workers)]
    for kind in TOKENS:
        starts = {worker: schedule.action(kind, worker, stage).start for worker in way}
        for sender, receiver in pairwise(way):
            crosses = 0 if sender == way[0] else ages[receiver] - ages[sender]
            before = ages[receiver] if sender == way[0] else crosses
            has = (made if sender == way[0] else starts[sender]) - before * schedule.period
            used = starts[receiver]
            yield Unshard(max(has, used - hop_ticks(schedule)), used, kind, stage, sender, receiver, crosses)


class _Leave(NamedTuple):
    """A token that is to leave for a step of its receiver, at a tick or when it is there."""

    tick: int
    unshard: Unshard
    step: int
    sender: int


class LentWeights:
    """Of all stages of a schedule.

    Raises:
        ValueError: weights more than one step old.
    """

    def __init__(self, schedule: Schedule, clip: Clip | None, workers: WorkerWriter) -> None:
        self._schedule, self._workers = schedule, workers
        stages = range(schedule.stages)
        self._unshards = [unshard for stage in stages for unshard in unshards(schedule, stage, clip)]
        self._ways = [weight_path(schedule, stage) for stage in stages]
        self._newest = [0] * schedule.stages  # version, at the owner
        self._kept = [0] * schedule.stages  # the oldest version there
        self._drains: list[int] = []
        self._opened = 0  # the step that began with the newest weights everywhere
        self._waiting: list[_Leave] = []  # a heap
        self._late: list[_Leave] = []  # whose time has come, but the sender has not got it yet
        self._senders: dict[StageMessage, int] = {}  # of what has left and was not used
        self._held: set[StageMessage] = set()  # by a worker that does not own it
        self._used: set[StageMessage] = set()  # of these: not needed there any more
        self._gone: set[StageMessage] = set()  # of these: handed on
        self._uses: dict[tuple[int, int], set[str]] = {}  # of a version at its owner, by stage: those still to come

    def begin_step(self, step: int) -> None:
        """A step is handed in. Of the next one leaves what it needs at its very beginning."""
        opens = step == self._opened
        for unshard in self._unshards:
            if opens or unshard.leaves >= 0:
                sender = self._ways[unshard.stage][0] if opens and unshard.crosses else unshard.sender
                self._plan(unshard, step, sender)
            if unshard.leaves < 0:
                self._plan(unshard, step + 1, unshard.sender)

    def made(self, stage: int, tick: int) -> None:
        """The owner has one version more."""
        self._newest[stage] += 1
        self._leave(tick)

    def before(self, due: ScheduledAction) -> None:
        """What is due leaves, what the action reads comes."""
        self._leave(due.tick)
        if due.worker == self._ways[due.stage][0]:
            return
        message = self._message(due.kind, due.place)
        if message not in self._senders:
            raise ValueError(f"schedule: {self._schedule.name}: {message} is read before it can have come")
        self._take(message, due.tick)
        self._leave(due.tick)

    def after(self, due: ScheduledAction) -> None:
        """What was lent is given back when it has been handed on."""
        owner = self._ways[due.stage][0]
        if due.worker != owner:
            message = self._message(due.kind, due.place)
            self._used.add(message)
            self._give_back(message, due.tick)
        elif due.kind == "B":
            self._end_use(due.stage, due.step, due.worker, "own", due.tick)

    def rest(self, stage: int, version: int, tick: int) -> None:
        """Nothing: its owner has it."""

    def drain(self, steps: int, tick: int) -> None:
        """What is lent or on its way goes, and so do versions that were kept for it."""
        self._waiting, self._late = [], []
        for message in sorted(self._held):
            self._reshard(message, tick)
        for message in sorted(self._senders):
            self._take(message, tick)
            self._reshard(message, tick)
        for stage in range(self._schedule.stages):
            self._forget(stage, steps, tick)
        self._drains.append(steps)
        self._opened = steps

    def _plan(self, unshard: Unshard, step: int, sender: int) -> None:
        tick = unshard.leaves + step * self._schedule.period
        heapq.heappush(self._waiting, _Leave(tick, unshard, step, sender))

    def _leave(self, tick: int) -> None:
        """All that is due by then and is there."""
        while self._waiting and self._waiting[0].tick <= tick:
            self._late.append(heapq.heappop(self._waiting))
        late, self._late = self._late, []
        for one in late:
            if self._is_there(one):
                self._send(one, tick)
            else:
                self._late.append(one)

    def _is_there(self, one: _Leave) -> bool:
        place = one.step, one.unshard.receiver, one.unshard.stage
        if one.sender == self._ways[one.unshard.stage][0]:
            return self._newest[one.unshard.stage] >= self._schedule.version(place, self._drains)
        return self._source(one) in self._held

    def _source(self, one: _Leave) -> StageMessage:
        """The token that a worker hands on, as it came to it."""
        return self._message(one.unshard.kind, (one.step - one.unshard.crosses, one.sender, one.unshard.stage))

    def _message(self, kind: Kind, place: Cell) -> StageMessage:
        return StageMessage(TOKENS[kind], *place, self._schedule.version(place, self._drains))

    def _send(self, one: _Leave, tick: int) -> None:
        stage, receiver, owner = one.unshard.stage, one.unshard.receiver, self._ways[one.unshard.stage][0]
        message = self._message(one.unshard.kind, (one.step, receiver, stage))
        self._senders[message] = one.sender
        self._workers.passes(message, one.sender, receiver, tick)
        if one.sender != owner:
            source = self._source(one)
            self._gone.add(source)
            self._give_back(source, tick)
        elif one.unshard.sender == owner:
            self._end_use(stage, one.step, receiver, one.unshard.kind, tick)

    def _take(self, message: StageMessage, tick: int) -> None:
        self._workers.takes("UNSHARD", message.micro_batch, tick, message, self._senders.pop(message))
        self._held.add(message)

    def _give_back(self, message: StageMessage, tick: int) -> None:
        """If nobody waits for it here."""
        is_last = message.micro_batch == self._ways[message.stage][-1]
        if message in self._used and (is_last or message in self._gone):
            self._reshard(message, tick)

    def _reshard(self, message: StageMessage, tick: int) -> None:
        place = message.step, message.micro_batch, message.stage
        self._workers.does(message.micro_batch, Instruction("RESHARD", tick, *place, message))
        for those in (self._held, self._used, self._gone):
            those.discard(message)

    def _end_use(self, stage: int, step: int, worker: int, use: str, tick: int) -> None:
        """Of a version at its owner, which goes with the last: its own backward, or what the next one gets of it."""
        version = step - self._schedule.staleness[worker][stage]
        if version < self._kept[stage]:
            return  # of a step that begins with newer weights
        every = {"own", *(TOKENS if len(self._ways[stage]) > 1 else ())}
        left = self._uses.setdefault((stage, version), every)
        left.discard(use)
        if not left:
            del self._uses[stage, version]
            self._forget(stage, version + 1, tick)

    def _forget(self, stage: int, before: int, tick: int) -> None:
        """Nobody reads an older version any more."""
        owner = self._ways[stage][0]
        while self._kept[stage] < before:
            self._workers.does(owner, Instruction("RESHARD", tick, self._kept[stage], owner, stage))
            self._uses.pop((stage, self._kept[stage]), None)
            self._kept[stage] += 1
