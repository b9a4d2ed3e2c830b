"""Plays the lists of instructions of all ranks against a clock: what each processor and link does, what is exposed.

The lists are those that the interpreter carries out, and whoever is earliest goes on. A letter moves when it is sent,
its receiver has made room and the sender's link is free; links carry one letter after another, latency included.
Steps overlap as they do in a run, so what is shown is a step in the midst of several.

Departures: ranks of a node do not share its card. A rank finds its caches colder than the profile did, the more
micro-batches are on their way: up to a sixth of a backward on a small model.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from armillary.planning.clock import BusySpan, Clock, Piece, Request, Simulation, Transfer, backward_pieces
from armillary.planning.pricing import Case, dense_update_seconds, landing_seconds
from armillary.planning.stage_costs import coding_seconds_of, copies_of, crossing, owners_of, reduced_bytes, sent_over
from armillary.plans.group import Group
from armillary.plans.parameter import ParameterFact, StageFact
from armillary.plans.plan import Plan
from armillary.plans.topology import Link
from armillary.schedules.edges import EdgeCode, codes_of
from armillary.schedules.instructions import ARRIVED, SUMS, TOKENS, Holdings, Instruction, Letter, operation
from armillary.schedules.lowering import Lowering
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import RECOMPUTE, options_of
from armillary.schedules.routes import NORM_BYTES
from armillary.schedules.schedule import Cell

__all__ = ["ALL_REDUCE", "RankClock", "play"]

ALL_REDUCE = "all-reduce"  # of a group over replicas; other flights are letters

_Key = tuple[Letter, int]  # a letter and its receiver
SHARED = ("copy's gradient", "shared gradient")
WARM, SHOWN = 4, 2  # steps before those that are timed; steps timed


@dataclass(frozen=True)
class _Stage:
    """Seconds of one micro-batch without coding, and of the optimizer's step; the last of its modules, which says what
    it passes on; bytes of its weights, and of the counts behind gradients that are summed on their way. Pieces: of the
    backward, whose seconds they add up to. landing: its gradients taken and added, or laid into a letter.
    """

    forward: float
    backward: tuple[Piece, ...]
    update: float
    passed: StageFact
    weight_bytes: int
    count_bytes: int
    landing: float


@dataclass(eq=False)
class _Letter:
    """sent, room: when both sides had done their part. arrived: when it is there. place: in `flights`."""

    sent: float | None = None
    room: float | None = None
    arrived: float | None = None
    place: int = -1


class _Flown(NamedTuple):
    """sent: when its sender did its part. is_seen: whether a side has waited for it, which is then when it landed."""

    sender: int
    sent: float
    flight: Transfer
    is_seen: bool = False

    def seen(self, now: float) -> "_Flown":
        land = min(now, self.flight.land_seconds) if self.is_seen else now
        return self._replace(flight=self.flight._replace(land_seconds=land), is_seen=True)


def play(plan: Plan, case: Case) -> Simulation:
    """A step of the rank whose processor does most; flights are those of all ranks, as a trace has them: from when both
    sides had asked to when one of them sees that it is over.

    Raises:
        ValueError: the schedule is not lowered to lists, or the machines are of other workers.
    """
    return _Play(plan, case).simulation()


class _Play:
    """What all ranks have in common."""

    def __init__(self, plan: Plan, case: Case) -> None:
        if case.topology.workers != plan.workers:
            raise ValueError(
                f"simulate: the plan puts stages on {plan.workers} workers, the machines have {case.topology.workers}; "
                f"plan again for these"
            )
        self.plan, self.case, self.options = plan, case, options_of(plan)
        self.codes = codes_of(self.options.edges)
        self.stages = list(_stages(plan, case, self.options))
        begins = [stage.begins for stage in plan.stages]
        self.ties, copies = owners_of(case.profile, begins), copies_of(case.profile, begins)
        self.shared_bytes = {stage: reduced_bytes(facts) for stage, facts in copies.items()}
        self.letters: dict[_Key, _Letter] = defaultdict(_Letter)
        self.blocked: dict[_Key, int] = {}  # ranks, by what they wait for
        self.woken: list[int] = []  # ranks that need wait no longer
        self.flights: list[_Flown] = []
        self.replicas = self.options.replicas(plan.workers)
        self.ranks = [RankClock(number, *self._program(number), self) for number in self._played]

    @property
    def _played(self) -> range:
        """Of replicas that do the same side by side the first is played."""
        return range(self.plan.workers // self.replicas)

    def _program(self, rank: int) -> tuple[list[Instruction], list[int]]:
        schedule, clip = self.options.schedule(), self.options.clip
        lowering = Lowering(
            schedule,
            rank,
            self.options.ranks(self._played) if len(self._played) > 1 else [rank] * schedule.workers,
            None if clip is None else clip.over(schedule.stages),
            reduces=self.replicas > 1,
            wires=self.options.wires(one_queue=self.case.topology.backend != "gloo", ties=self.ties),
        )
        program, ends = list[Instruction](), list[int]()
        for _ in range(WARM + SHOWN):
            program += lowering.next_step()
            ends.append(len(program))
        return program, ends

    def simulation(self) -> Simulation:
        ready = [(0.0, number) for number in self._played]
        while ready:
            _, number = heapq.heappop(ready)
            rank = self.ranks[number]
            if (lacking := rank.goes_on()) is not None:
                self.blocked[lacking] = number
            elif rank.at < len(rank.program):
                heapq.heappush(ready, (rank.clock.now_seconds, number))
            for other in self.woken:
                heapq.heappush(ready, (self.ranks[other].clock.now_seconds, other))
            self.woken.clear()
        whole = max(rank.times[-1] - rank.times[-1 - SHOWN] for rank in self.ranks) / SHOWN
        shown = max(self.ranks, key=lambda rank: rank.clock.worked_seconds)
        begin = shown.times[-2]
        spans = tuple(_cut(shown.clock.spans, begin, begin + whole))
        flights = sorted(self._step_flights(), key=lambda flight: flight.launch_seconds)
        return Simulation(self.plan.workers, spans, tuple(flights), whole)

    def _step_flights(self) -> Iterator[Transfer]:
        """Those that one step sends, of all ranks; bytes are the mean over workers. Not of the last step, whose letters
        nobody has read yet."""
        for number, sent, flight, _ in self.flights:
            begin, end = self.ranks[number].times[-1 - SHOWN :][:2]
            if begin <= sent < end:
                yield flight._replace(
                    launch_seconds=flight.launch_seconds - begin,
                    land_seconds=flight.land_seconds - begin,
                    sent_bytes=flight.sent_bytes / len(self.ranks),
                )

    def link(self, sender: int, receiver: int) -> tuple[str, Link]:
        topology = self.case.topology
        is_inside = topology.node_of(sender) == topology.node_of(receiver)
        return ("inside", topology.inside) if is_inside else ("between", topology.between)

    def crossing(self, letter: Letter) -> tuple[EdgeCode | None, _Stage]:
        """How it is coded, and the stage below the edge."""
        return self.codes.get((letter.what, letter.stage)), self.stages[letter.stage - (letter.what != "activation")]

    def groups(self, stage: int) -> list[Group]:
        return [group for group in self.plan.groups if group.stage == stage]

    def bytes_of(self, letter: Letter) -> float:
        stage, (code, below) = self.stages[letter.stage], self.crossing(letter)
        if letter.what in ("activation", "activation gradient"):
            return sent_over(code, below.passed)
        if letter.what in SUMS:
            return stage.weight_bytes + stage.count_bytes
        if letter.what in ("weights", *TOKENS.values()):
            return stage.weight_bytes
        return self.shared_bytes.get(letter.stage, 0) if letter.what in SHARED else NORM_BYTES

    def meet(self, sender: int, receiver: int, letter: Letter) -> None:
        """With both sides there the letter moves."""
        known = self.letters[letter, receiver]
        if known.sent is None or known.room is None:
            return
        (lane, link), nbytes = self.link(sender, receiver), self.bytes_of(letter)
        clock, seconds = self.ranks[sender].clock, link.seconds(nbytes)
        joint = max(known.sent, known.room)
        known.arrived = clock.occupy(lane, BusySpan(lane, f"stage {letter.stage}", "send", joint, seconds, nbytes))
        self.woken += [self.blocked.pop(key) for key in ((letter, receiver),) if key in self.blocked]
        known.place = len(self.flights)
        flight = Transfer(f"stage {letter.stage}", letter.what, joint, known.arrived, nbytes)
        self.flights.append(_Flown(sender, known.sent, flight))


@dataclass(eq=False)
class RankClock:
    """One rank's list against its clock. Methods that take an instruction are what the table's rows call.

    Args of note:
        ends: places in the program where a step's part is over. times: when they were over.
        reduced: places in `flights`, by step and stage. summed: joined with another rank's: they lie in one already.
        over: whose gradients are all there.
        apart: when what has gone to another place is there, by the place that made it: for rows of a schedule's own.
    """

    number: int
    program: list[Instruction]
    ends: list[int]
    play: _Play
    clock: Clock = field(default_factory=Clock)
    at: int = 0
    times: list[float] = field(default_factory=list)
    reduced: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    summed: set[tuple[int, int]] = field(default_factory=set)
    over: set[tuple[int, int]] = field(default_factory=set)
    apart: dict[Cell, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._held = Holdings(self.play.options.schedule())

    def goes_on(self) -> _Key | None:
        """By one instruction; else the letter that it needs and that is still without its time."""
        one = self.program[self.at]
        row = operation(one.op)
        wanted = [key for thing in row.uses(one, self._held) if (key := self._sent(thing, one)) is not None]
        for lacked in wanted:
            if self.play.letters[lacked].arrived is None:
                return lacked
        for letter, receiver in wanted:
            self._take(letter, receiver)
        row.seconds(self, one)
        self.at += 1
        while self.ends and self.ends[0] == self.at:
            self.times.append(self.clock.now_seconds)
            self.ends.pop(0)
        return None

    def _sent(self, thing: Letter, one: Instruction) -> _Key | None:
        """What crosses to this rank, or has left it."""
        if thing.what.startswith(ARRIVED):
            return thing._replace(what=thing.what.removeprefix(ARRIVED)), one.peer
        return (thing, self.number) if (thing, self.number) in self.play.letters else None

    def _take(self, letter: Letter, receiver: int) -> None:
        known, began, flights = self.play.letters[letter, receiver], self.clock.now_seconds, self.play.flights
        arrived = known.arrived or 0.0
        self.clock.wait(f"stage {letter.stage}", arrived)
        flown = flights[known.place] = flights[known.place].seen(self.clock.now_seconds)
        if receiver == self.number:
            beside = max(0.0, min(began, arrived) - flown.flight.launch_seconds)
            self._carry(flown.sender, receiver, letter, beside)
            self._code(letter, "decode")

    def stage(self, one: Instruction) -> _Stage:
        return self.play.stages[one.stage]

    def work(self, one: Instruction, action: str, seconds: float) -> None:
        """The processor does it."""
        self.clock.work(f"stage {one.stage}", action, seconds)

    def carry_apart(self, one: Instruction, lane: str, action: str, nbytes: float, seconds: float) -> float:
        """Something goes on a lane beside the processor; when it is there."""
        span = BusySpan(lane, f"stage {one.stage}", action, self.clock.now_seconds, seconds, nbytes)
        return self.clock.occupy(lane, span)

    def wait(self, one: Instruction, until_seconds: float) -> None:
        self.clock.wait(f"stage {one.stage}", until_seconds)

    def forward(self, one: Instruction) -> None:
        self.work(one, "forward", self.stage(one).forward)

    def backward(self, one: Instruction) -> None:
        """With the step's last micro-batch gradients become final, one after another."""
        key = one.step, one.stage
        is_released = key in self.reduced
        waiting = self._trained(one.stage)
        for piece in self.stage(one).backward:
            self.work(one, "backward", piece.seconds)
            waiting.discard(piece.parameter or "")
            if is_released and piece.parameter:
                self._release(one, waiting)
        if is_released:
            self._release(one, ())
        if one.micro_batch == self.play.options.micro_batches - 1:
            self.over.add(key)

    def update(self, one: Instruction) -> None:
        self.land_means(one)
        self.work(one, "update", self.stage(one).update)

    def land_means(self, one: Instruction) -> None:
        """Means over replicas are waited for."""
        for place in self.reduced.pop((one.step, one.stage), ()):
            flown = self.play.flights[place]
            self.clock.wait(flown.flight.group, flown.flight.land_seconds)
            self.play.flights[place] = flown.seen(self.clock.now_seconds)

    def add_up(self, one: Instruction) -> None:
        self.summed.add((one.step, one.stage))
        self.work(one, "sum", self.stage(one).landing)

    def reduce(self, one: Instruction) -> None:
        key = one.step, one.stage
        self.reduced[key] = []
        self._release(one, () if key in self.over else self._trained(one.stage))

    def send_letter(self, one: Instruction) -> None:
        assert one.letter is not None
        self._code(one.letter, "encode")
        self.work(one, "pack", self._packing(one.letter))
        self.play.letters[one.letter, one.peer].sent = self.clock.now_seconds
        self.play.meet(self.number, one.peer, one.letter)
        self._carry(self.number, one.peer, one.letter)

    def make_room(self, one: Instruction) -> None:
        assert one.letter is not None
        self.play.letters[one.letter, self.number].room = self.clock.now_seconds
        self.play.meet(one.peer, self.number, one.letter)

    def _code(self, letter: Letter, side: str) -> None:
        """One side of a letter that is coded."""
        code, below = self.play.crossing(letter)
        if seconds := coding_seconds_of(code, below.passed, self.play.case):
            self.clock.work(f"stage {letter.stage}", side, seconds)

    def _packing(self, letter: Letter) -> float:
        """Many tensors laid into one."""
        lies_in_one = (letter.step, letter.stage) in self.summed and letter.what in SUMS
        is_packed = letter.what in (*SUMS, "weights") and not lies_in_one
        return self.play.stages[letter.stage].landing if is_packed else 0.0

    def _carry(self, sender: int, receiver: int, letter: Letter, beside: float = math.inf) -> None:
        """One side's share of what compute cannot hide of a letter's bytes; beside: seconds of compute that it had."""
        _, link = self.play.link(sender, receiver)
        carried = link.seconds(self.play.bytes_of(letter)) - link.latency_seconds
        shown = (1 - self.play.case.topology.hidden_share) / 2
        self.clock.work(f"stage {letter.stage}", "carry", shown * min(carried, beside))

    def _trained(self, stage: int) -> set[str]:
        return {name for group in self.play.groups(stage) for name in group.parameters}

    def _release(self, one: Instruction, waiting: Collection[str]) -> None:
        """Means over replicas set out, in the plan's order, of the groups that wait for no gradient."""
        gone, case = self.reduced[one.step, one.stage], self.play.case
        for group in self.play.groups(one.stage)[len(gone) :]:
            if not set(waiting).isdisjoint(group.parameters):
                return
            facts = [case.profile.parameter(name) for name in group.parameters]
            crossed = crossing(facts, group.own_exchange, self.play.options, case)
            sent, seconds = crossed.sent_bytes, crossed.link_seconds
            self.clock.work(group.name, "pack", crossed.processor_seconds)
            launch, is_inside = self.clock.now_seconds, case.topology.nodes == 1
            request = Request(sent, seconds * is_inside, seconds * (not is_inside))
            landed = self.clock.send(group.name, ALL_REDUCE, [request])
            gone.append(len(self.play.flights))
            flight = Transfer(group.name, ALL_REDUCE, launch, landed, sent)
            self.play.flights.append(_Flown(self.number, launch, flight))


def _stages(plan: Plan, case: Case, options: ScheduleOptions) -> Iterator[_Stage]:
    units = [stage for stage in case.profile.stages if stage.name or not plan.stages]  # left whole: all there is
    starts = [next(place for place, unit in enumerate(units) if unit.name == one.begins) for one in plan.stages] or [0]
    recomputed = [number for number, one in enumerate(plan.stages) if one.residency.name == RECOMPUTE]
    for number, (first, end) in enumerate(pairwise([*starts, len(units)])):
        part, facts = units[first:end], _facts(plan, case, number)
        forward = sum(unit.forward_seconds for unit in part)
        again = forward if number in recomputed else 0.0
        landing = landing_seconds(facts, case)
        backward = (Piece("", again, None), *_backward_of(part, case), Piece("", landing, None))
        weights, counts = sum(fact.bytes for fact in facts), sum(fact.bytes // max(1, fact.elements) for fact in facts)
        update = dense_update_seconds(weights, facts, case)
        yield _Stage(forward, backward, update, part[-1], weights, counts, landing)


def _backward_of(part: Sequence[StageFact], case: Case) -> Iterator[Piece]:
    names = {unit.name for unit in part}
    return (piece for piece in backward_pieces(case.profile) if piece.stage in names)


def _facts(plan: Plan, case: Case, stage: int) -> list[ParameterFact]:
    return [case.profile.parameter(name) for group in plan.groups if group.stage == stage for name in group.parameters]


def _cut(spans: Sequence[BusySpan], begin: float, end: float) -> Iterator[BusySpan]:
    """What of them lies between two moments, counted from the first."""
    for span in spans:
        start, stop = max(span.start_seconds, begin), min(span.end_seconds, end)
        if stop > start or (begin <= span.start_seconds < end):
            yield span._replace(start_seconds=start - begin, seconds=max(0.0, stop - start))
