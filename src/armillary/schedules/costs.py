"""What a schedule sends, what its processes hold, and the pace at which they work: counted on its lists.

Counted is the steady state: a step in the midst of several, where steps overlap as the table says. A thing counts from
the instruction that makes it, or makes room for it, to the one that uses it up (`instructions.py`). What stays with a
process without an instruction, weights and their gradients, is counted by who runs a stage.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from armillary.schedules.clipping import Clip
from armillary.schedules.instructions import (
    ARRIVED,
    OWN,
    SAVED,
    SUMS,
    TOKENS,
    VERSION,
    Holdings,
    StageMessage,
    operation,
)
from armillary.schedules.lowering import Lowering
from armillary.schedules.method import Lists, ScheduleOptions, StageLoad
from armillary.schedules.rank_list import ChannelRules
from armillary.schedules.routes import NORM_BYTES, owner_of
from armillary.schedules.schedule import Cell, Schedule

__all__ = [
    "Counts",
    "Planned",
    "SentLetters",
    "copies_held",
    "counted",
    "held_copies",
    "is_stale",
    "mean_copies",
    "peak_on_one_device",
    "peak_over_workers",
    "sent_by_workers",
]

WARM = 3  # steps before those that are counted
FORWARD = 1 / 3  # of the seconds of a stage both ways


class SentLetters(NamedTuple):
    """So many messages of a kind in a step, in the mean over steps."""

    sender: int
    what: str
    stage: int
    times: float


def sent_messages(lists: Mapping[int, Lists]) -> list[SentLetters]:
    """Of a step. Norms of either direction are one kind."""
    found = Counter[tuple[int, str, int]]()
    for rank, calls in lists.items():
        for one in (one for call in calls[WARM:] for one in call if one.op == "SEND"):
            what = one.message.what if one.message is not None else ""
            found[rank, "norm" if what == "partial norm" else what, one.stage] += 1
    steps = len(next(iter(lists.values()))) - WARM
    return [SentLetters(*key, count / steps) for key, count in sorted(found.items())]


def sent_by_workers(schedule: Schedule) -> list[SentLetters]:
    """The same where each worker of a schedule is a process."""
    ranks = range(schedule.workers)
    lowered = {rank: Lowering(schedule, rank, ranks) for rank in ranks}
    return sent_messages({rank: [one.next_step() for _ in range(WARM + 1)] for rank, one in lowered.items()})


@dataclass(frozen=True)
class Counts:
    """Of the processes that carry out one table. lists: by process, call by call."""

    options: ScheduleOptions
    lists: Mapping[int, Lists]

    @property
    def steps(self) -> int:
        """That are counted; after them the same comes again."""
        return len(next(iter(self.lists.values()))) - WARM

    @cached_property
    def sent(self) -> list[SentLetters]:
        return sent_messages(self.lists)

    def sent_bytes(self, stages: Sequence[StageLoad]) -> list[float]:
        """Of each process of a ring in a step: stages go whole, norms are one number."""
        found = dict.fromkeys(self.lists, 0.0)
        for one in self.sent:
            found[one.sender] += one.times * (stages[one.stage].weight_bytes if one.what != "norm" else NORM_BYTES)
        return list(found.values())

    def peak(self, stages: Sequence[StageLoad], only: int | None = None) -> int:
        """Bytes of activations of the process that keeps most, or of `only` that one. With what its stages remember of
        samples, which stays with it."""
        return max(self._peak(rank, stages) for rank in (self.lists if only is None else [only]))

    def _peak(self, rank: int, stages: Sequence[StageLoad]) -> int:
        program = [one for call in self.lists[rank] for one in call]
        held, most, now = Holdings(self.options.schedule()), 0, 0
        for one in program:
            changed = held.carry_out(one)
            now += sum(stages[thing.stage].activation_bytes for thing in changed.made if thing.what == SAVED)
            now -= sum(stages[thing.stage].activation_bytes for thing in changed.used if thing.what == SAVED)
            most = max(most, now)
        return most + sum(stages[j].cache_bytes for j in {one.stage for one in program if one.op == "F"})

    def pace(self, seconds: Sequence[float]) -> float:
        """A step's seconds if messages took no time. Where stages stay with processes, turns take as long as the
        slowest stage's: what a quicker one would gain goes into its messages and waits.

        Args:
            seconds: of forward and backward of each stage, for a micro-batch.
        """
        if self.options.method.placement.parts:
            seconds = [max(seconds)] * len(seconds)
        clocks = [_Paced(calls, Holdings(self.options.schedule())) for calls in self.lists.values()]
        arrived: dict[StageMessage, float] = {}
        while any(clock.goes_on(seconds, arrived) for clock in clocks):
            pass
        return max(clock.ends[-1] - clock.ends[WARM - 1] for clock in clocks) / self.steps


def counted(options: ScheduleOptions) -> Counts:
    where = options.where
    return Counts(options, options.lists(WARM + max(where.rotation(stage) for stage in range(options.stages))))


@dataclass(frozen=True)
class Planned:
    """What the notes of a schedule are made from.

    Args of note:
        stages: per micro-batch. running: paths of modules that keep running statistics.
        exchange_bytes, exchange_seconds: of the groups that collectives carry, per worker and step.
        forward_seconds, backward_seconds: of the whole model, for one micro-batch.
    """

    options: ScheduleOptions
    schedule: Schedule
    stages: Sequence[StageLoad]
    workers: int
    running: Sequence[str] = ()
    exchange_bytes: float = 0.0
    exchange_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    @cached_property
    def counts(self) -> Counts:
        return counted(self.options)


class _Paced:
    """One process, whose forwards and backwards alone take time."""

    def __init__(self, calls: Lists, held: Holdings) -> None:
        self._program = [one for call in calls for one in (*call, None)]  # None: a call is over
        self._comes = {one.message for one in self._program if one is not None and one.op == "RECV"}
        self._held, self._at, self._now = held, 0, 0.0
        self.ends: list[float] = []

    def goes_on(self, seconds: Sequence[float], sent: dict[StageMessage, float]) -> bool:
        """Whether it could. sent: when messages left, of all processes."""
        began = self._at
        while self._at < len(self._program):
            one = self._program[self._at]
            if one is None:
                self.ends.append(self._now)
            else:
                needed = [thing for thing in operation(one.op).uses(one, self._held) if thing in self._comes]
                if any(thing not in sent for thing in needed):
                    break
                share = {"F": FORWARD, "B": 1 - FORWARD}.get(one.op, 0.0)
                self._now = max([self._now, *(sent[thing] for thing in needed)]) + share * seconds[one.stage]
                if one.op == "SEND" and one.message is not None:
                    sent[one.message] = self._now
            self._at += 1
        return self._at > began


def copies_held(options: ScheduleOptions, stage: int, processes: int, slots: float) -> float:
    """Tensors of a stage's size that a process holds, in the mean over those of a table.

    Weights and a gradient wherever the stage runs, an older version where one is read, what corrections remember of
    stale weights; optimizer state at the stage's owner. Where weights are lent: what is there for its use.

    Args:
        slots: of the optimizer's state.
    """
    method, stale = options.method, is_stale(options, stage)
    if method.residency.lends_weights:
        return (1 + slots) / processes + mean_copies(options.schedule(), stage, options.clip)
    remembered = sum(correction.copies for correction in options.built_corrections()) * stale
    if method.replicates_table:
        return 2 + stale + slots + remembered
    where = options.where
    return (2 * len(where.ranks(stage)) + where.older(stage) + slots + remembered) / processes


def held_copies(schedule: Schedule, worker: int, clip: Clip | None = None) -> list[Counter[int]]:
    """Copies of each stage's weights that a worker holds during each of its 2K actions of a step, in the steady state.

    Those it owns, older versions of them, and what is lent, from the room that is made for it until it has gone.
    """
    owned = [stage for stage in range(schedule.stages) if owner_of(schedule, stage) == worker]
    return [
        Counter(owned) + Counter(stage for what, stage, *_ in held if what not in (*SUMS, OWN))
        for held in _held(schedule, worker, clip)
    ]


def mean_copies(schedule: Schedule, stage: int, clip: Clip | None = None) -> float:
    """Copies of a stage's weights and gradients a worker holds beside those it owns, over workers and actions."""
    held = [one for worker in range(schedule.workers) for one in _held(schedule, worker, clip)]
    return sum(kept.stage == stage for one in held for kept in one) / len(held)


@lru_cache(maxsize=512)
def _held(schedule: Schedule, worker: int, clip: Clip | None) -> tuple[frozenset["_Kept"], ...]:
    """What is held beside weights that are owned, during each action of a step."""
    if schedule.workers == 1:  # nothing is lent
        return (frozenset(),) * (2 * schedule.stages)
    lowering = Lowering(schedule, worker, range(schedule.workers), clip, wires=ChannelRules(lends=True))
    whole = [one for _ in range(WARM + 2) for one in lowering.next_step()]  # some of a step comes with the next one
    held, newest, found = Holdings(schedule, clip), Counter[int](), []
    held.begin(whole)
    for one in whole:
        if one.op in TOKENS and one.step == WARM:
            kept = (_kept(thing, lowering.owned, newest) for thing in held.here)
            found.append(frozenset(one for one in kept if one is not None))
        held.carry_out(one)
        newest[one.stage] += one.op == "UPDATE"
        if one.message is not None and one.op == "RECV":  # its room is held from here on
            held.here.add(one.message)
        elif one.message is not None and one.op == "SEND":  # and what is sent until it is waited for
            held.here.add(one.message._replace(what=ARRIVED + one.message.what))
    return tuple(found)


class _Kept(NamedTuple):
    """Memory of a stage's size. which: its step or version."""

    what: str
    stage: int
    which: int
    micro_batch: int = -1


def _kept(thing: StageMessage, owned: Collection[int], newest: Mapping[int, int]) -> _Kept | None:
    """The memory in which it lies, if that is as large as a stage and no newest version of what is owned."""
    what, is_sent = thing.what.removeprefix(ARRIVED), thing.what.startswith(ARRIVED)
    if what == VERSION:
        return None if thing.version >= newest[thing.stage] else _Kept("old", thing.stage, thing.version)
    if what in (*SUMS, OWN):
        return _Kept(what, thing.stage, thing.step)
    if what not in TOKENS.values():
        return None
    if (
        is_sent and thing.stage in owned
    ):  # what comes from another is handed on as it is, of what is owned a copy leaves
        return _Kept(f"copy of {what}", thing.stage, thing.step, thing.micro_batch)
    return _Kept(what, thing.stage, thing.version)


def is_stale(options: ScheduleOptions, stage: int) -> bool:
    """Whether some micro-batch reads old weights of the stage, so that an older version is kept."""
    return any(ages[stage] for ages in options.schedule().staleness)


def peak_on_one_device(schedule: Schedule, stages: Sequence[StageLoad]) -> int:
    """Bytes of activations held at most in the steady state when one device does it all, one action after the other."""
    return max(_bytes(schedule.held_after(tick), stages) for tick in _steady(schedule))


def peak_over_workers(schedule: Schedule, stages: Sequence[StageLoad], only: int | None = None) -> int:
    """The same with workers side by side: of all of them together, or of `only` one. With what their stages remember of
    samples, which stays with a worker."""

    def mine(tick: int) -> set[Cell]:
        held = schedule.held(tick)
        return {place for place in held if only is None or schedule.worker_of(place[1], place[2]) == only}

    kept = [j for j in range(len(stages)) if only is None or schedule.worker_of(0, j) == only]
    remembered = sum(stages[j].cache_bytes for j in kept)
    return remembered + max(_bytes(mine(tick), stages) for tick in _steady(schedule))


def _steady(schedule: Schedule) -> range:
    return range(2 * schedule.period, 4 * schedule.period)


def _bytes(held: Iterable[Cell], stages: Sequence[StageLoad]) -> int:
    return sum(stages[stage].activation_bytes for _, _, stage in held)
