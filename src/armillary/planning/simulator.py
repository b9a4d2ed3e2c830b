"""Plays a step of a plan against a clock: what each processor and link does, what is exposed.

Every plan is a list of instructions a rank, those that the interpreter carries out, and whoever is earliest goes on. A
message moves when it is sent, its receiver has made room and the sender's link is free; links carry one message after
another, latency included. Where steps overlap, what is shown is a step in the midst of several.

In a loop of the user's own all ranks do the same, so one list and one rank stand for any number of them: the one whose
link is busiest. What is exchanged there group by group is in `group_clock.py`.

Departures: ranks of a node do not share its card. A rank finds its caches colder than the profile did, the more
micro-batches are on their way: up to a sixth of a backward on a small model.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

from armillary.planning.activities import StageCosts, Step, costs_of, least_seconds
from armillary.planning.clock import BusySpan, Clock, Simulation, Transfer
from armillary.planning.group_clock import Flown, GroupClock, Push
from armillary.planning.owner_clock import play_owned
from armillary.planning.pricing import Case
from armillary.planning.stage_costs import coding_seconds_of, sent_over
from armillary.plans.group import Forecast, Group
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Link
from armillary.schedules.edges import EdgeCode, codes_of
from armillary.schedules.instructions import ARRIVED, SUMS, TOKENS, Holdings, Instruction, StageMessage, operation
from armillary.schedules.lowering import Lowering
from armillary.schedules.registry import SCHEDULES, options_of
from armillary.schedules.routes import NORM_BYTES
from armillary.schedules.schedule import Cell

__all__ = ["RankClock", "quickest", "simulate"]

_Key = tuple[StageMessage, int]  # a message and its receiver
SHARED = ("copy's gradient", "shared gradient")
UNKNOWN = Forecast()


def simulate(
    plan: Plan, case: Case, overlap: bool = True, pushed: Mapping[str, float] = MappingProxyType({})
) -> Simulation:
    """One step of the plan on the machines of the case, of the rank whose processor does most; those of a plan for a
    loop of the user's own need not be those it was made for. Flights are those of all ranks, as a trace has them: from
    when both sides had asked to when one of them sees that it is over.

    Args:
        overlap: False makes the processor wait for every request: what the plan's forecast adds up to.
        pushed: by group, how many times the bytes that are forecast its gradients take, where somebody counted them.
            Neither under a schedule that owns the loop.

    Raises:
        ValueError: the plan is for another model, its schedule is not lowered to lists of instructions, or it owns the
            loop and the machines are of other workers.
    """
    _refuse_other(plan, case.profile)
    return _simulated(Step(_played_of(plan), case, overlap, tuple(sorted(pushed.items())), plan))


def quickest(plans: Sequence[Plan], case: Case) -> dict[int, float]:
    """By place, the simulated seconds of those plans for a loop of the user's own that can be the quickest. Of the
    others a bound is longer than that."""
    least, found = [least_seconds(plan, case) for plan in plans], dict[int, float]()
    for place in sorted(range(len(plans)), key=least.__getitem__):
        if not found or least[place] < min(found.values()):
            found[place] = simulate(plans[place], case).step_seconds
    return found


def _played_of(plan: Plan) -> tuple[object, ...]:
    groups = tuple(replace(group, forecast=UNKNOWN, reason="") for group in plan.groups)
    return groups, plan.schedule, plan.stages, plan.mesh


@lru_cache(maxsize=64)
def _simulated(asked: Step) -> Simulation:
    plan, case = asked.plan, asked.case
    if SCHEDULES[plan.schedule.name].placement.deals_rows:
        return play_owned(plan, case)
    return _Play(asked).simulation()


def _refuse_other(plan: Plan, profile: Profile) -> None:
    if plan.model_fingerprint != profile.model_fingerprint:
        raise ValueError(
            f"simulate: the plan was made for model {plan.model_fingerprint}, the profile is of "
            f"{profile.model_fingerprint}; give the profile.json that stands beside the plan, or plan again"
        )


@dataclass(eq=False)
class _Letter:
    """sent, room: when both sides had done their part. arrived: when it is there. place: in `flights`."""

    sent: float | None = None
    room: float | None = None
    arrived: float | None = None
    place: int = -1


class _Play:
    """What all ranks have in common."""

    def __init__(self, asked: Step) -> None:
        self.plan, self.case, self.options = asked.plan, asked.case, options_of(asked.plan)
        self.costs = costs_of(asked, self.options)
        self.codes = codes_of(self.options.edges)
        self.messages: dict[_Key, _Letter] = defaultdict(_Letter)
        self.blocked: dict[_Key, int] = {}  # ranks, by what they wait for
        self.woken: list[int] = []  # ranks that need wait no longer
        self.flights: list[Flown] = []
        self.ranks = [self._rank(number, asked.overlap) for number in self.costs.ranks]

    def _rank(self, number: int, overlap: bool) -> "RankClock":
        schedule, ranks, clip = self.costs.schedule, self.costs.ranks, self.options.clip
        lowering = Lowering(
            schedule,
            number,
            self.options.ranks(ranks) if len(ranks) > 1 else [number] * schedule.workers,
            None if clip is None else clip.over(schedule.stages),
            reduces=self.costs.is_reduced,
            wires=self.options.wires(one_queue=self.case.topology.backend != "gloo", ties=self.costs.ties),
        )
        program, ends, clock = list[Instruction](), list[int](), Clock()
        for _ in range(self.costs.warm + self.costs.shown):
            program += lowering.next_step()
            ends.append(len(program))
        groups = GroupClock(number, clock, self.costs.does, self.case, overlap, self.costs.action)
        return RankClock(number, program, ends, self, clock, groups)

    def simulation(self) -> Simulation:
        ready = [(0.0, number) for number in self.costs.ranks]
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
        shown = self.costs.shown
        whole = max(rank.times[-1] - rank.times[-1 - shown] for rank in self.ranks) / shown
        busiest = max(self.ranks, key=lambda rank: rank.clock.worked_seconds)
        begin = busiest.times[-2]
        spans = tuple(_cut(busiest.clock.spans, begin, begin + whole))
        flights = sorted(self._step_flights(), key=lambda flight: flight.launch_seconds)
        return Simulation(self.case.topology.workers, spans, tuple(flights), whole)

    def _step_flights(self) -> Iterator[Transfer]:
        """Those that one step sends, of all ranks; bytes are the mean over workers. Not of the last of several steps,
        whose messages nobody has read yet."""
        for number, sent, flight, _ in (*self.flights, *(one for rank in self.ranks for one in rank.groups.flights)):
            begin, end = self.ranks[number].times[-1 - self.costs.shown :][:2]
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

    def crossing(self, message: StageMessage) -> tuple[EdgeCode | None, StageCosts]:
        """How it is coded, and the stage below the edge."""
        below = message.stage - (message.what != "activation")
        return self.codes.get((message.what, message.stage)), self.costs.stages[below]

    def groups(self, stage: int) -> list[Group]:
        return [group for group in self.plan.groups if group.stage == stage]

    def bytes_of(self, message: StageMessage) -> float:
        stage, (code, below) = self.costs.stages[message.stage], self.crossing(message)
        if message.what in ("activation", "activation gradient"):
            return sent_over(code, below.passed)
        if message.what in SUMS:
            return stage.weight_bytes + stage.count_bytes
        if message.what in ("weights", *TOKENS.values()):
            return stage.weight_bytes
        return self.costs.shared_bytes.get(message.stage, 0) if message.what in SHARED else NORM_BYTES

    def meet(self, sender: int, receiver: int, message: StageMessage) -> None:
        """With both sides there the message moves."""
        known = self.messages[message, receiver]
        if known.sent is None or known.room is None:
            return
        (lane, link), nbytes = self.link(sender, receiver), self.bytes_of(message)
        clock, seconds = self.ranks[sender].clock, link.seconds(nbytes)
        joint = max(known.sent, known.room)
        known.arrived = clock.occupy(lane, BusySpan(lane, f"stage {message.stage}", "send", joint, seconds, nbytes))
        self.woken += [self.blocked.pop(key) for key in ((message, receiver),) if key in self.blocked]
        known.place = len(self.flights)
        flight = Transfer(f"stage {message.stage}", message.what, joint, known.arrived, nbytes)
        self.flights.append(Flown(sender, known.sent, flight))


@dataclass(eq=False)
class RankClock:
    """One rank's list against its clock. Methods that take an instruction are what the table's rows call.

    Args of note:
        ends: places in the program where a step's part is over. times: when they were over.
        reduced: pushes under way, by step and stage. summed: joined with another rank's: they lie in one already.
        over: whose gradients are all there.
        apart: when what has gone to another place is there, by the place that made it: for rows of a schedule's own.
    """

    number: int
    program: list[Instruction]
    ends: list[int]
    play: _Play
    clock: Clock
    groups: GroupClock
    at: int = 0
    times: list[float] = field(default_factory=lambda: [0.0])
    reduced: dict[tuple[int, int], list[Push]] = field(default_factory=dict)
    summed: set[tuple[int, int]] = field(default_factory=set)
    over: set[tuple[int, int]] = field(default_factory=set)
    apart: dict[Cell, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._held = Holdings(self.play.costs.schedule)

    def goes_on(self) -> _Key | None:
        """By one instruction; else the message that it needs and that is still without its time."""
        one = self.program[self.at]
        row = operation(one.op)
        wanted = [key for thing in row.uses(one, self._held) if (key := self._sent(thing, one)) is not None]
        for lacked in wanted:
            if self.play.messages[lacked].arrived is None:
                return lacked
        for message, receiver in wanted:
            self._take(message, receiver)
        row.seconds(self, one)
        self.at += 1
        while self.ends and self.ends[0] == self.at:
            self.times.append(self.clock.now_seconds)
            self.ends.pop(0)
        return None

    def _sent(self, thing: StageMessage, one: Instruction) -> _Key | None:
        """What crosses to this rank, or has left it."""
        if thing.what.startswith(ARRIVED):
            return thing._replace(what=thing.what.removeprefix(ARRIVED)), one.peer
        return (thing, self.number) if (thing, self.number) in self.play.messages else None

    def _take(self, message: StageMessage, receiver: int) -> None:
        known, began, flights = self.play.messages[message, receiver], self.clock.now_seconds, self.play.flights
        arrived = known.arrived or 0.0
        self.clock.wait(f"stage {message.stage}", arrived)
        flown = flights[known.place] = flights[known.place].seen(self.clock.now_seconds)
        if receiver == self.number:
            beside = max(0.0, min(began, arrived) - flown.flight.launch_seconds)
            self._carry(flown.sender, receiver, message, beside)
            self._code(message, "decode")

    def stage(self, one: Instruction) -> StageCosts:
        return self.play.costs.stages[one.stage]

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
        self.groups.turn()
        for part in self.stage(one).forward:
            for name in part.tables:
                self.groups.pull(name)
            self.clock.work(part.what, "forward", part.seconds)

    def backward(self, one: Instruction) -> None:
        """With the step's last micro-batch gradients become final, one after another."""
        key = one.step, one.stage
        is_released = key in self.reduced
        waiting = self._trained(one.stage)
        for piece in self.stage(one).backward:
            self.clock.work(piece.stage, "backward", piece.seconds)
            waiting.discard(piece.parameter or "")
            if is_released and piece.parameter:
                self._release(one, waiting)
        if is_released:
            self._release(one, ())
        if one.micro_batch == self.play.costs.schedule.micro_batches - 1:
            self.over.add(key)

    def update(self, one: Instruction) -> None:
        self.land_means(one)
        self.groups.exchange_weights(before=True)
        for what, seconds in self.stage(one).updates.items():
            self.clock.work(what, "update", seconds)
        self.groups.exchange_weights(before=False)
        self.groups.end()

    def land_means(self, one: Instruction) -> None:
        """Means over ranks are waited for."""
        self.groups.land(self.reduced.pop((one.step, one.stage), []))

    def add_up(self, one: Instruction) -> None:
        self.summed.add((one.step, one.stage))
        self.work(one, "sum", self.stage(one).landing)

    def reduce(self, one: Instruction) -> None:
        key = one.step, one.stage
        self.reduced[key] = []
        self._release(one, () if key in self.over else self._trained(one.stage))

    def send_message(self, one: Instruction) -> None:
        assert one.message is not None
        self._code(one.message, "encode")
        self.work(one, "pack", self._packing(one.message))
        self.play.messages[one.message, one.peer].sent = self.clock.now_seconds
        self.play.meet(self.number, one.peer, one.message)
        self._carry(self.number, one.peer, one.message)

    def make_room(self, one: Instruction) -> None:
        assert one.message is not None
        self.play.messages[one.message, self.number].room = self.clock.now_seconds
        self.play.meet(one.peer, self.number, one.message)

    def _code(self, message: StageMessage, side: str) -> None:
        """One side of a message that is coded."""
        code, below = self.play.crossing(message)
        if seconds := coding_seconds_of(code, below.passed, self.play.case):
            self.clock.work(f"stage {message.stage}", side, seconds)

    def _packing(self, message: StageMessage) -> float:
        """Many tensors laid into one."""
        lies_in_one = (message.step, message.stage) in self.summed and message.what in SUMS
        is_packed = message.what in (*SUMS, "weights") and not lies_in_one
        return self.play.costs.stages[message.stage].landing if is_packed else 0.0

    def _carry(self, sender: int, receiver: int, message: StageMessage, beside: float = math.inf) -> None:
        """One side's share of what compute cannot hide of a message's bytes; beside: seconds of compute that it had."""
        _, link = self.play.link(sender, receiver)
        carried = link.seconds(self.play.bytes_of(message)) - link.latency_seconds
        shown = (1 - self.play.case.topology.hidden_share) / 2
        self.clock.work(f"stage {message.stage}", "carry", shown * min(carried, beside))

    def _trained(self, stage: int) -> set[str]:
        return {name for group in self.play.groups(stage) for name in group.parameters}

    def _release(self, one: Instruction, waiting: Collection[str]) -> None:
        """Means over ranks set out, in the plan's order, of the groups that wait for no gradient."""
        gone = self.reduced[one.step, one.stage]
        for group in self.play.groups(one.stage)[len(gone) :]:
            if not set(waiting).isdisjoint(group.parameters):
                return
            self.groups.launch(group.name, gone)


def _cut(spans: Sequence[BusySpan], begin: float, end: float) -> Iterator[BusySpan]:
    """What of them lies between two moments, counted from the first."""
    for span in spans:
        start, stop = max(span.start_seconds, begin), min(span.end_seconds, end)
        if stop > start or (begin <= span.start_seconds < end):
            yield span._replace(start_seconds=start - begin, seconds=max(0.0, stop - start))
