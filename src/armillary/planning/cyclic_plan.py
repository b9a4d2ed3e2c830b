"""A plan whose schedule is cyclic: where to cut, what each stage sends and holds, the picture, and what speaks against.

The profile's stages are joined into K consecutive ones of nearly equal cost, unless the user names the cuts. Bytes are
those of the schedule's messages, between stages of what they return; both are what the runtime counts. Shared devices
change from step to step, so theirs are the mean over steps; what a zero_ring holds is the mean over workers and
actions.

Source: Fournier & Oyallon, 2024.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from armillary.facts.parameter import ParameterFact
from armillary.facts.plan import Choice, Forecast, Group, Placement, Plan, Update
from armillary.facts.profile import Profile
from armillary.facts.stage import StageFact
from armillary.planning.cyclic_tables import NO_TABLES, Wish, table_groups, team_notes, team_traffic
from armillary.planning.pricing import Case, fill_seconds
from armillary.planning.schedule_notes import notes_on, peak_over_workers, stagger
from armillary.planning.stage_load import StageLoad
from armillary.schedules.balance import balanced
from armillary.schedules.cyclic_modes import RINGS, CyclicOptions, read_options
from armillary.schedules.messages import NORM_BYTES, Message, pipeline_messages, ring_messages
from armillary.schedules.schedule import Schedule
from armillary.schedules.shared import Sharing
from armillary.schedules.shared_messages import shared_messages
from armillary.schedules.table_modes import refuse_tables
from armillary.schedules.zero_messages import TOKENS, mean_copies, zero_messages

__all__ = ["pipeline_bytes", "plan_cyclic"]

ITEM_BYTES = 4  # of an activation, to weigh what has no matrix product


@dataclass(frozen=True)
class _Subject:
    """What is planned: options with the cuts filled in, their schedule, and the stages."""

    options: CyclicOptions
    schedule: Schedule
    stages: tuple[StageLoad, ...]
    parameters: tuple[tuple[ParameterFact, ...], ...]  # trained and kept whole, by stage
    tables: tuple[tuple[ParameterFact, ...], ...]  # kept by row, by stage


def plan_cyclic(case: Case, choice: Choice, wished: Mapping[str, Wish] = NO_TABLES) -> Plan:
    """
    Args:
        wished: the tables to keep by row, by name.
        choice: "cyclic" with mode and, if wanted, slack, micro_batches, stages, points, costs (`CyclicOptions`).

    Raises:
        ValueError: options that do not go together, a cut that is no stage of the profile, or too few modules.
    """
    topology = case.topology
    options = read_options(choice.options, topology.workers)
    refuse_tables(options, list(wished))
    subject = _subject(case, options, wished)
    update: Update = "stale" if subject.schedule.stale_share else "exact"
    groups = []
    for j, facts in enumerate(subject.parameters):
        groups += table_groups(j, subject.tables[j], wished, (subject.options, subject.schedule, case))
        if not facts:
            continue
        names = tuple(fact.name for fact in facts)
        placement: Placement = "replicated" if subject.options.mode == "one_device" else "stage_sharded"
        reason = f"from {subject.stages[j].first}" + (f" to {subject.stages[j].last}" if len(facts) > 1 else "")
        forecast = _forecast(j, subject, case)
        groups.append(Group(f"stage {j}", names, placement, Choice(subject.options.mode), update, forecast, reason))
    seconds = [stage.seconds for stage in subject.stages]
    per_step = sum(seconds)
    if subject.options.mode in ("pipeline", "shared"):
        per_step = max(seconds) if subject.options.mode == "pipeline" else stagger(seconds)
    return Plan(
        workers=topology.workers,
        groups=tuple(groups),
        model_fingerprint=case.profile.model_fingerprint,
        topology_fingerprint=topology.fingerprint,
        workers_per_node=topology.workers_per_node,
        schedule=Choice("cyclic", subject.options.as_options()),
        compute_seconds=per_step * (1 if subject.options.mode in RINGS else subject.options.micro_batches),
        notes=(
            *notes_on(subject.options, subject.schedule, subject.stages, case.profile.running),
            *team_notes(subject.options, topology.workers),
        ),
        priced_with=asdict(case.assumptions),
        picture=subject.options.picture(),
    )


def pipeline_bytes(case: Case) -> float:
    """What the fullest of the workers holds under mode "pipeline": weights, gradients, state and activations.

    Raises:
        ValueError: fewer modules than workers to cut between.
    """
    subject = _subject(case, read_options({"mode": "pipeline"}, case.topology.workers))
    copies = 2 + case.assumptions.optimizer_slots
    held = []
    for j, load in enumerate(subject.stages):
        is_stale = any(ages[j] for ages in subject.schedule.staleness)
        weights = load.weight_bytes * (copies + is_stale)
        held.append(weights + peak_over_workers(subject.schedule, subject.stages, subject.schedule.worker_of(0, j)))
    return float(max(held))


def _subject(case: Case, options: CyclicOptions, wished: Collection[str] = ()) -> _Subject:
    profile = case.profile
    units = [stage for stage in profile.stages if stage.name]
    names = [unit.name for unit in units]
    if options.points:
        strange = [point for point in options.points if point not in names]
        if strange:
            raise ValueError(
                f"schedule: cannot cut at {', '.join(strange)}: no stage of the profile begins there; it has "
                f"{', '.join(names)}. Cut at one of them, or profile(..., stages=[...]) the modules to cut at"
            )
        starts = tuple(names.index(point) for point in options.points)
        if list(starts) != sorted(set(starts)) or 0 in starts:
            raise ValueError(f"schedule: points must rise within {', '.join(names)} and not begin with the first")
    else:
        weights = [float(unit.forward_flops + unit.output_bytes // ITEM_BYTES) for unit in units]
        starts = balanced([(weight, 2 * weight) for weight in weights], options.stages)
        options = replace(options, points=tuple(names[start] for start in starts))
    edges = [0, *starts, len(units)]
    parts = [units[start:end] for start, end in pairwise(edges)]
    owner = {unit.name: j for j, part in enumerate(parts) for unit in part}
    parameters: list[list[ParameterFact]] = [[] for _ in parts]
    for fact in profile.parameters:
        if fact.requires_grad:
            _refuse_tie(fact, owner)
            parameters[owner[_stage_of(fact, profile)]].append(fact)
    whole = tuple(tuple(fact for fact in facts if fact.name not in wished) for facts in parameters)
    tables = tuple(tuple(fact for fact in facts if fact.name in wished) for facts in parameters)
    loads = tuple(_load(part, facts, case) for part, facts in zip(parts, whole, strict=True))
    return _Subject(options, options.schedule(), loads, whole, tables)


def _refuse_tie(fact: ParameterFact, owner: Mapping[str, int]) -> None:
    """
    Raises:
        ValueError: the names of one parameter lie in several stages, which would read it at different ages.
    """
    places = [(name, stage) for name in (fact.name, *fact.aliases) for stage in _held_in(name, owner)]
    for name, stage in places[1:]:
        if stage != places[0][1]:
            raise ValueError(
                f"schedule: {places[0][0]} of stage {places[0][1]} and {name} of stage {stage} are one parameter; its "
                f"two uses would see weights of different age. Cut so that both are in one stage (points=[...]), or "
                f"untie them"
            )


def _held_in(name: str, owner: Mapping[str, int]) -> list[int]:
    """The stage of the innermost module of the profile that holds a parameter of this name, if one does."""
    holders = [unit for unit in owner if name.startswith(f"{unit}.")]
    return [owner[max(holders, key=len)]] if holders else []


def _stage_of(fact: ParameterFact, profile: Profile) -> str:
    """The stage that holds a parameter; one outside all stages goes with the neighbour in the order of gradients."""
    if fact.stage:
        return fact.stage
    inside = [other for other in profile.arrivals if other.stage]
    if fact.arrival is None or not inside:
        raise ValueError(
            f"schedule: {fact.name!r} is in no stage and got no gradient; freeze it, or put it in a module"
        )
    place = fact.arrival
    return min(inside, key=lambda other: abs((other.arrival or 0) - place)).stage


def _load(part: Sequence[StageFact], facts: Sequence[ParameterFact], case: Case) -> StageLoad:
    computed = sum(unit.forward_seconds + unit.backward_seconds for unit in part)
    return StageLoad(
        first=part[0].name,
        last=part[-1].name,
        flops=sum(unit.forward_flops for unit in part),
        seconds=computed + fill_seconds(facts, case),
        weight_bytes=sum(fact.bytes for fact in facts),
        count_bytes=sum(fact.bytes // max(1, fact.elements) for fact in facts),
        activation_bytes=sum(unit.activation_bytes for unit in part),
        output_bytes=part[-1].output_bytes,
    )


def _forecast(j: int, subject: _Subject, case: Case) -> Forecast:
    """Mean over workers. Memory of weights: the working copy, an older version where one is read, gradient, state."""
    mode, load, processes = subject.options.mode, subject.stages[j], case.topology.workers
    holders = 1 if mode == "one_device" else processes
    slots = case.assumptions.optimizer_slots
    is_stale = any(ages[j] for ages in subject.schedule.staleness)
    turn, messages = _messages(j, subject)
    sent_bytes = sum(messages) / turn / processes
    seconds = case.topology.link.seconds(sent_bytes, round(len(messages) / turn)) if messages else 0.0
    if mode == "one_device":
        sent_bytes, seconds = team_traffic(load.weight_bytes + load.count_bytes, case.topology)
    if mode == "ring":  # a copy and a gradient everywhere; master weights and state at home
        return Forecast(sent_bytes, load.weight_bytes * (2 + (1 + slots) / processes), seconds)
    if mode == "zero_ring":  # master weights and state at home; elsewhere what is there for its use
        tokens = mean_copies(subject.schedule, j, subject.options.clip)
        return Forecast(sent_bytes, load.weight_bytes * ((1 + slots) / processes + tokens), seconds)
    if mode == "shared":  # the same on the devices of the stage, and an older copy where one is read
        devices = len(Sharing(subject.schedule).ranks(j))
        copies = (2 + is_stale) * devices + 1 + slots
        return Forecast(sent_bytes, load.weight_bytes * copies / processes, seconds)
    remembered = sum(remedy.copies for remedy in subject.options.built_remedies()) * is_stale
    return Forecast(sent_bytes, load.weight_bytes * (2 + is_stale + remembered + slots) / holders, seconds)


def _messages(j: int, subject: _Subject) -> tuple[int, list[int]]:
    """Bytes of every message of stage j, between stages those it sends; and how many steps they are of."""
    options, load = subject.options, subject.stages[j]
    below = subject.stages[j - 1].output_bytes if j else 0
    # behind gradients that are summed a count per parameter travels
    bytes_of: dict[str, int] = {
        "weights": load.weight_bytes,
        "partial gradient": load.weight_bytes + load.count_bytes,
        "gradient": load.weight_bytes + load.count_bytes,
        "activation": load.output_bytes,
        "activation gradient": below,
        "norm": NORM_BYTES,
        **dict.fromkeys(TOKENS, load.weight_bytes),
    }
    turn, found = 1, list[Message]()
    if options.mode == "ring":
        found = ring_messages(subject.schedule, options.clip)
    elif options.mode == "zero_ring":
        found = zero_messages(subject.schedule, options.clip)
    elif options.mode == "pipeline":
        found = pipeline_messages(subject.schedule, options.clip)
    elif options.mode == "shared":
        sharing = Sharing(subject.schedule)
        turn = sharing.rotation(j)
        found = [message for step in range(turn) for message in shared_messages(sharing, step, options.clip)]
    return turn, [bytes_of[message.content] for message in found if message.stage == j]
