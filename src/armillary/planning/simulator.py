"""Plays one step of a plan against a clock: what the processor does, what is on the links meanwhile, what is exposed.

All ranks do the same in a simultaneous schedule, so one rank stands for any number of them: the one whose link is
busiest. Tables are pulled before the stage that reads them; gradients are packed and pushed, in the plan's order, as
backward makes them, and take the processor for what compute cannot hide of them; what an exchange brought is merged and
the optimizer steps when backward is over, as `runtime/hybrid/executor` does. Exchanges are not run: their requests and
bytes are those of pricing (design 2.2).

Departures: one request at a time on a link; what belongs to one exchange is not interleaved with another's; a stage's
gradients appear in the order of arrival, each after a part of the stage's backward in proportion to the elements read.
"""

from dataclasses import dataclass
from typing import NamedTuple

from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Group, Plan
from armillary.facts.profile import Profile
from armillary.facts.stage import StageFact
from armillary.facts.trace import Record, Trace
from armillary.planning.activities import Activities, activities, idle_request
from armillary.planning.clock import Clock, Flight, Request, Span
from armillary.planning.pricing import Case

__all__ = ["LOOK_UPS", "Simulation", "simulate"]

OUTSIDE = ""
LOOK_UPS = "look-ups"  # headers and the round that ends them go by this name in a measured trace too


@dataclass(frozen=True)
class Simulation:
    """One step of the busiest rank. spans: in no particular order. flights: in the order of their launches."""

    workers: int
    spans: tuple[Span, ...]
    flights: tuple[Flight, ...]
    step_seconds: float

    @property
    def processor_seconds(self) -> float:
        """Everything the processor does: forward, backward, packing, index work, the optimizer's pass."""
        return sum(span.seconds for span in self.spans if span.lane == "processor")

    @property
    def exposed_seconds(self) -> dict[str, float]:
        """How long the processor stood still for each group."""
        found: dict[str, float] = {}
        for span in self.spans:
            if span.lane == "exposed":
                found[span.what] = found.get(span.what, 0.0) + span.seconds
        return found

    @property
    def sent_bytes(self) -> dict[str, float]:
        """By group, mean over workers; headers of look-ups by themselves."""
        found: dict[str, float] = {}
        for flight in self.flights:
            found[flight.group] = found.get(flight.group, 0.0) + flight.sent_bytes
        return found

    @property
    def in_flight_seconds(self) -> dict[str, float]:
        """By group, from launch to landing, as a measured trace has them; what overlaps is counted each."""
        found: dict[str, float] = {}
        for flight in self.flights:
            found[flight.group] = found.get(flight.group, 0.0) + flight.seconds
        return found

    @property
    def trace(self) -> Trace:
        """The same as a measurement would be: one record per flight, of step 0 on rank 0."""
        records = [Record(0, f.group, f.action, f.launch_seconds, f.seconds, f.sent_bytes) for f in self.flights]
        return Trace(0, tuple(records))


class _Piece(NamedTuple):
    """A part of backward, and the parameter whose gradient is there after it."""

    stage: str
    seconds: float
    parameter: str | None


def simulate(plan: Plan, case: Case, overlap: bool = True) -> Simulation:
    """One step of the plan on the machines of the case, which need not be those it was made for.

    Args:
        overlap: False makes the processor wait for every request: what the plan's forecast adds up to.

    Raises:
        ValueError: the plan is for another model, or its schedule is not simultaneous.
    """
    _refuse_other(plan, case.profile)
    player = _Player(plan, case, overlap)
    player.forward()
    player.backward()
    player.step()
    return Simulation(case.topology.workers, tuple(player.clock.spans), tuple(player.flights), player.clock.now_seconds)


def _refuse_other(plan: Plan, profile: Profile) -> None:
    if plan.model_fingerprint != profile.model_fingerprint:
        raise ValueError(
            f"simulate: the plan was made for model {plan.model_fingerprint}, the profile is of "
            f"{profile.model_fingerprint}; give the profile.json that stands beside the plan, or plan again"
        )
    if plan.schedule.name != "simultaneous":
        raise ValueError(f"simulate: schedule {plan.schedule} is not simulated; give a plan with the simultaneous one")


class _Player:
    """A step under way. waiting: (group, when its exchange is over, what the group does), in order of launch."""

    def __init__(self, plan: Plan, case: Case, overlap: bool) -> None:
        self.plan, self.case, self.overlap = plan, case, overlap
        self.clock = Clock()
        self.flights: list[Flight] = []
        self.does = {group.name: activities(group, plan.mean, case) for group in plan.groups}
        self.waiting: list[tuple[Group, float, float, Activities]] = []

    def forward(self) -> None:
        stages = {stage.name: stage for stage in self.case.profile.stages}
        order = [name for name in stages if name != OUTSIDE] + [name for name in stages if name == OUTSIDE]
        pulled = [(group, self.case.profile.parameter(group.parameters[0]).stage) for group in self.plan.groups]
        for name in order:
            for group, stage in pulled:
                if stage == name and self.does[group.name].pull:
                    self._fetch(LOOK_UPS, "pull", self.does[group.name].headers)
                    self._fetch(group.name, "pull", self.does[group.name].pull)
                    self.clock.work(group.name, "gather rows", self.does[group.name].gather_seconds)
            self.clock.work(name or "model", "forward", stages[name].forward_seconds)

    def backward(self) -> None:
        tables = sum(bool(does.pull) for does in self.does.values())
        if tables:
            self._fetch(LOOK_UPS, "pull", (idle_request(self.case.topology, tables),))
        missing = [set(group.parameters) for group in self.plan.groups]
        for piece in _pieces(self.case.profile):
            self.clock.work(piece.stage or "model", "backward", piece.seconds)
            for names in missing:
                names.discard(piece.parameter or "")
            while len(self.waiting) < len(missing) and not missing[len(self.waiting)]:
                self._launch(self.plan.groups[len(self.waiting)])
        for group in self.plan.groups[len(self.waiting) :]:
            self._launch(group)

    def step(self) -> None:
        """Lands every exchange in order of launch, then the optimizer passes over all groups."""
        for group, began, done, does in self.waiting:
            self.clock.wait(group.name, done)
            self._land(group.name, "push", began, does.push)
            self.clock.work(group.name, "merge rows", does.merge_seconds)
        for group in self.plan.groups:
            self.clock.work(group.name, "update", self.does[group.name].update_seconds)

    def _launch(self, group: Group) -> None:
        does = self.does[group.name]
        self.clock.work(group.name, "pack", does.pack_seconds)
        began = self.clock.now_seconds
        done = self.clock.send(group.name, "push", does.push)
        if not self.overlap:
            self.clock.wait(group.name, done)
        else:  # what compute cannot hide of it takes the processor
            shown = 1 - self.case.topology.hidden_share
            self.clock.work(group.name, "carry", shown * sum(request.seconds for request in does.push))
        self.waiting.append((group, began, done, does))

    def _fetch(self, name: str, action: str, requests: tuple[Request, ...]) -> None:
        began = self.clock.now_seconds
        self.clock.wait(name, self.clock.send(name, action, requests))
        self._land(name, action, began, requests)

    def _land(self, name: str, action: str, began: float, requests: tuple[Request, ...]) -> None:
        if requests:
            sent_bytes = sum(request.sent_bytes for request in requests)
            self.flights.append(Flight(name, action, began, self.clock.now_seconds, sent_bytes))


def _pieces(profile: Profile) -> list[_Piece]:
    """Backward, stage by stage, in the order in which their first gradients arrived."""
    of_stage: dict[str, list[ParameterFact]] = {stage.name: [] for stage in profile.stages}
    for fact in profile.arrivals:
        of_stage[fact.stage].append(fact)
    pieces = []
    for stage in _backward_order(profile, of_stage):
        facts = of_stage[stage.name]
        works = [fact.alpha * fact.elements for fact in facts]
        total = sum(works)
        if total <= 0:
            pieces += [_Piece(stage.name, 0.0, fact.name) for fact in facts]
            pieces.append(_Piece(stage.name, stage.backward_seconds, None))
            continue
        for fact, work in zip(facts, works, strict=True):
            pieces.append(_Piece(stage.name, stage.backward_seconds * work / total, fact.name))
    return pieces


def _backward_order(profile: Profile, of_stage: dict[str, list[ParameterFact]]) -> list[StageFact]:
    """Against the model's order where gradients say nothing; what has no gradient goes with the stage after it."""
    keyed: list[tuple[int, int, StageFact]] = []
    last = -1
    outside = [stage for stage in profile.stages if stage.name == OUTSIDE]
    inner = [stage for stage in profile.stages if stage.name != OUTSIDE]
    for stage in [*outside, *reversed(inner)]:
        arrivals = [fact.arrival for fact in of_stage[stage.name] if fact.arrival is not None]
        last = min(arrivals) if arrivals else last
        keyed.append((last, len(keyed), stage))
    return [stage for _, _, stage in sorted(keyed, key=lambda entry: entry[:2])]
