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

from armillary.planning.clock import BusySpan, Clock, Lane, Piece, Request, Simulation, Transfer, backward_pieces
from armillary.planning.pricing import Case, dense_update_seconds, landing_seconds
from armillary.planning.stage_costs import coding_seconds_of, copies_of, crossing, owners_of, reduced_bytes, sent_over
from armillary.plans.group import Group
from armillary.plans.parameter import ParameterFact, StageFact
from armillary.plans.plan import Plan
from armillary.plans.topology import Link
from armillary.schedules.checker import SUMS
from armillary.schedules.edges import EdgeCode, codes_of
from armillary.schedules.instructions import Instruction, Letter, What, Wires
from armillary.schedules.lowering import Lowering
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import RECOMPUTE, options_of
from armillary.schedules.routes import NORM_BYTES

__all__ = ["ALL_REDUCE", "play"]

ALL_REDUCE = "all-reduce"  # of a group over replicas; other flights are letters

_Key = tuple[Letter, int]  # a letter and its receiver
SHARED: tuple[What, ...] = ("copy's gradient", "shared gradient")
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
class _Rank:
    program: list[Instruction]
    ends: list[int]  # places in the program where a step's part is over
    clock: Clock = field(default_factory=Clock)
    at: int = 0
    times: list[float] = field(default_factory=list)  # when they were over


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
        self.reduced: dict[tuple[int, int, int], list[int]] = {}  # places in `flights`, by rank, step and stage
        self.summed = set[tuple[int, int, int]]()  # joined with another rank's: they lie in one already
        self.over = set[tuple[int, int, int]]()  # whose gradients are all there
        self.ranks = [_Rank(*self._program(rank)) for rank in self._played]

    @property
    def _played(self) -> range:
        """Of replicas that do the same side by side the first is played."""
        return range(self.plan.workers // self.replicas)

    def _program(self, rank: int) -> tuple[list[Instruction], list[int]]:
        schedule, clip = self.options.schedule(), self.options.clip
        clip = None if clip is None else clip.over(schedule.stages)
        lowering = Lowering(
            schedule,
            rank,
            self.options.ranks(self._played) if len(self._played) > 1 else [rank] * schedule.workers,
            clip,
            reduces=self.replicas > 1,
            wires=Wires(self.case.topology.backend != "gloo", self.codes, self.options.method.lends, ties=self.ties),
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
            if (lacking := self._goes_on(number, rank)) is not None:
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

    def _goes_on(self, number: int, rank: _Rank) -> _Key | None:
        """By one instruction; else the letter that it needs and that is still without its time."""
        lacking = self._carries_out(number, rank, rank.program[rank.at])
        if lacking is None:
            rank.at += 1
            while rank.ends and rank.ends[0] == rank.at:
                rank.times.append(rank.clock.now_seconds)
                rank.ends.pop(0)
        return lacking

    def _carries_out(self, number: int, rank: _Rank, one: Instruction) -> _Key | None:
        """The letter that it lacks, if it does."""
        clock, stage = rank.clock, self.stages[one.stage]
        wanted = [(one.reads, number)] if one.reads is not None and (one.reads, number) in self.letters else []
        if one.op == "OVER" and one.letter is not None:
            wanted = [(one.letter, one.peer)]
        for lacked in wanted:
            if self.letters[lacked].arrived is None:
                return lacked
        for letter, receiver in wanted:
            known, began = self.letters[letter, receiver], clock.now_seconds
            arrived = known.arrived or 0.0
            clock.wait(f"stage {letter.stage}", arrived)
            flown = self.flights[known.place] = self.flights[known.place].seen(clock.now_seconds)
            if receiver == number:
                beside = max(0.0, min(began, arrived) - flown.flight.launch_seconds)
                self._carry(clock, flown.sender, number, letter, beside)
            if one.op in ("F", "B"):
                self._code(number, letter, "decode")
        if one.op in ("UPDATE", "NORM"):
            for place in self.reduced.pop((number, one.step, one.stage), ()):
                flown = self.flights[place]
                clock.wait(flown.flight.group, flown.flight.land_seconds)
                self.flights[place] = flown.seen(clock.now_seconds)
        if one.op == "F":
            clock.work(f"stage {one.stage}", "forward", stage.forward)
        elif one.op == "B":
            self._backward(number, clock, one)
        elif one.op == "UPDATE":
            clock.work(f"stage {one.stage}", "update", stage.update)
        elif one.op == "SUM":
            self.summed.add((number, one.step, one.stage))
            clock.work(f"stage {one.stage}", "sum", stage.landing)
        elif one.op == "REDUCE":
            key = number, one.step, one.stage
            self.reduced[key] = []
            self._release(number, clock, one, () if key in self.over else self._trained(one.stage))
        elif one.letter is not None and one.op in ("SEND", "RECEIVE"):
            if one.op == "SEND":
                self._code(number, one.letter, "encode")
                clock.work(f"stage {one.stage}", "pack", self._packing(number, one.letter))
            self._meet(number, one)
            if one.op == "SEND":
                self._carry(clock, number, one.peer, one.letter)
        return None

    def _code(self, number: int, letter: Letter, side: str) -> None:
        """One side of a letter that is coded."""
        code, below = self._crossing(letter)
        if seconds := coding_seconds_of(code, below.passed, self.case):
            self.ranks[number].clock.work(f"stage {letter.stage}", side, seconds)

    def _packing(self, number: int, letter: Letter) -> float:
        """Many tensors laid into one."""
        lies_in_one = (number, letter.step, letter.stage) in self.summed and letter.what in SUMS
        return self.stages[letter.stage].landing if letter.what in (*SUMS, "weights") and not lies_in_one else 0.0

    def _carry(self, clock: Clock, sender: int, receiver: int, letter: Letter, beside: float = math.inf) -> None:
        """One side's share of what compute cannot hide of a letter's bytes; beside: seconds of compute that it had."""
        _, link = self._link(sender, receiver)
        carried = link.seconds(self._bytes_of(letter)) - link.latency_seconds
        shown = (1 - self.case.topology.hidden_share) / 2
        clock.work(f"stage {letter.stage}", "carry", shown * min(carried, beside))

    def _link(self, sender: int, receiver: int) -> tuple[Lane, Link]:
        topology = self.case.topology
        is_inside = topology.node_of(sender) == topology.node_of(receiver)
        return ("inside", topology.inside) if is_inside else ("between", topology.between)

    def _crossing(self, letter: Letter) -> tuple[EdgeCode | None, _Stage]:
        """How it is coded, and the stage below the edge."""
        return self.codes.get((letter.what, letter.stage)), self.stages[letter.stage - (letter.what != "activation")]

    def _backward(self, number: int, clock: Clock, one: Instruction) -> None:
        """With the step's last micro-batch gradients become final, one after another."""
        is_released = (number, one.step, one.stage) in self.reduced
        waiting = self._trained(one.stage)
        for piece in self.stages[one.stage].backward:
            clock.work(f"stage {one.stage}", "backward", piece.seconds)
            waiting.discard(piece.parameter or "")
            if is_released and piece.parameter:
                self._release(number, clock, one, waiting)
        if is_released:
            self._release(number, clock, one, ())
        if one.micro_batch == self.options.micro_batches - 1:
            self.over.add((number, one.step, one.stage))

    def _trained(self, stage: int) -> set[str]:
        return {name for group in self._groups(stage) for name in group.parameters}

    def _groups(self, stage: int) -> list[Group]:
        return [group for group in self.plan.groups if group.stage == stage]

    def _release(self, number: int, clock: Clock, one: Instruction, waiting: Collection[str]) -> None:
        """Means over replicas set out, in the plan's order, of the groups that wait for no gradient."""
        gone = self.reduced[number, one.step, one.stage]
        for group in self._groups(one.stage)[len(gone) :]:
            if not set(waiting).isdisjoint(group.parameters):
                return
            facts = [self.case.profile.parameter(name) for name in group.parameters]
            crossed = crossing(facts, group.own_exchange, self.options, self.case)
            sent, seconds = crossed.sent_bytes, crossed.link_seconds
            clock.work(group.name, "pack", crossed.processor_seconds)
            launch, is_inside = clock.now_seconds, self.case.topology.nodes == 1
            landed = clock.send(group.name, ALL_REDUCE, [Request(sent, seconds * is_inside, seconds * (not is_inside))])
            gone.append(len(self.flights))
            self.flights.append(_Flown(number, launch, Transfer(group.name, ALL_REDUCE, launch, landed, sent)))

    def _meet(self, number: int, one: Instruction) -> None:
        """One side has done its part; with both the letter moves."""
        assert one.letter is not None
        sender, receiver = (number, one.peer) if one.op == "SEND" else (one.peer, number)
        letter, now = self.letters[one.letter, receiver], self.ranks[number].clock.now_seconds
        if one.op == "SEND":
            letter.sent = now
        else:
            letter.room = now
        if letter.sent is None or letter.room is None:
            return
        (lane, link), nbytes = self._link(sender, receiver), self._bytes_of(one.letter)
        clock, seconds = self.ranks[sender].clock, link.seconds(nbytes)
        start = max(letter.sent, letter.room, clock.free_seconds[lane])
        clock.free_seconds[lane] = letter.arrived = start + seconds
        self.woken += [self.blocked.pop(key) for key in ((one.letter, receiver),) if key in self.blocked]
        name = f"stage {one.letter.stage}"
        clock.spans.append(BusySpan(lane, name, "send", start, seconds, nbytes))
        letter.place, joint = len(self.flights), max(letter.sent, letter.room)
        flight = Transfer(name, one.letter.what, joint, letter.arrived, nbytes)
        self.flights.append(_Flown(sender, letter.sent, flight))

    def _bytes_of(self, letter: Letter) -> float:
        stage, (code, below) = self.stages[letter.stage], self._crossing(letter)
        sums = stage.weight_bytes + stage.count_bytes
        bytes_of: dict[What, float] = {
            "activation": sent_over(code, below.passed),
            "activation gradient": sent_over(code, below.passed),
            "partial gradient": sums,
            "gradient": sums,
            "weights": stage.weight_bytes,
            "forward weights": stage.weight_bytes,
            "backward weights": stage.weight_bytes,
            **dict.fromkeys(SHARED, self.shared_bytes.get(letter.stage, 0)),
        }
        return bytes_of.get(letter.what, NORM_BYTES)


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
