"""A plan whose schedule cuts the model: where, what each stage sends and holds, and what speaks against it.

The profile's stages are joined into K consecutive ones of nearly equal cost, unless the user names the cuts. Bytes are
those of the schedule's messages, between stages of what they return; both are what the runtime counts. Where devices
change from step to step, theirs are the mean over steps; memory of a stage is the mean over workers.

Source: Fournier & Oyallon, 2024; Huang et al., GPipe, 2019; Narayanan et al., 2021.

A plan whose schedule owns the loop but leaves the model whole: buckets, bytes, memory, and what speaks against it.

Source: Pipe-SGD (Li et al., 2018); delayed parameter update (ZeRO-Offload, Ren et al., 2021).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from armillary.models.structure import balanced
from armillary.planning.candidates import BucketLimits, buckets, default_limits, peak_bytes
from armillary.planning.constraints import PLAIN
from armillary.planning.pricing import Case, dense_forecast, landing_seconds
from armillary.planning.stage_costs import (
    NO_WAYS,
    EdgeRequests,
    GroupPart,
    Ways,
    charged_to,
    crossing,
    departures_of,
    loads_with_edges,
    notes_on_edges,
    parts_of_stage,
    reduced_bytes,
    sent_over,
    uses_of,
)
from armillary.plans.group import Forecast, Group, Layout, StagePlan
from armillary.plans.mesh import STAGE
from armillary.plans.parcel import layout_of
from armillary.plans.plan import Plan
from armillary.plans.profile import ParameterFact, Profile, StageFact
from armillary.plans.registry import Choice
from armillary.schedules.costs import Counts, Planned, copies_held, counted
from armillary.schedules.edges import Edge, codes_of
from armillary.schedules.instructions import TOKENS
from armillary.schedules.method import ScheduleOptions, StageLoad
from armillary.schedules.notes import notes_on
from armillary.schedules.registry import SCHEDULES, read
from armillary.schedules.routes import NORM_BYTES
from armillary.schedules.schedule import Schedule
from armillary.schedules.ties import ParameterUse, complaint

__all__ = ["StagedWay", "plan_staged", "plan_uncut", "staged_ways"]

BUCKET_BYTES = 5 << 20  # nothing waits for a bucket's end within the step, so latency is worth paying less often


def plan_uncut(case: Case, choice: Choice) -> Plan:
    """
    Args:
        choice: a schedule that leaves the model whole, with options if wanted; a bucket is else of 5 MiB, on nccl 25.

    Raises:
        ValueError: an option there is not.
    """
    topology, stages = case.topology, case.profile.stages
    options = read(choice, topology.workers)
    schedule = options.schedule()
    trained = [fact for fact in case.profile.parameters if fact.requires_grad]
    size = options.bucket_bytes or max(BUCKET_BYTES, default_limits(topology.backend).bytes)
    departures = ("stale",) if schedule.stale_share else ()
    groups = tuple(
        _group(place, members, departures, case)
        for place, members in enumerate(buckets(trained, BucketLimits(size, size)))
    )
    forward = sum(stage.forward_seconds for stage in stages)
    backward = sum(stage.backward_seconds for stage in stages)
    planned = Planned(
        options=options,
        schedule=schedule,
        stages=(),
        workers=topology.workers,
        running=case.profile.running,
        exchange_bytes=sum(group.forecast.sent_bytes for group in groups),
        exchange_seconds=sum(group.forecast.seconds for group in groups),
        forward_seconds=forward,
        backward_seconds=backward,
    )
    return Plan(
        mesh=options.mesh(topology.workers),
        groups=groups,
        model_fingerprint=case.profile.model_fingerprint,
        topology_fingerprint=topology.fingerprint,
        workers_per_node=topology.workers_per_node,
        schedule=Choice(options.name, options.as_options()),
        compute_seconds=forward + backward,
        activation_bytes=peak_bytes(groups, case),
        notes=notes_on(planned),
        priced_with=case.assumptions.as_fields(),
    )


def _group(place: int, members: tuple[ParameterFact, ...], departures: tuple[str, ...], case: Case) -> Group:
    """Gradients are held twice: under way, and being made."""
    names, by = tuple(fact.name for fact in members), PLAIN["replicated"]
    forecast = dense_forecast(members, by, case) + Forecast(memory_bytes=layout_of(members).joined_bytes)
    return Group(
        f"bucket {place}", names, "replicated", by, departures=departures, forecast=forecast, reason="read whole"
    )


ITEM_BYTES = 4  # of an activation, to weigh what has no matrix product
RECOMPUTE = Choice("recompute")
OWN_LOSS = Choice("own_loss")  # of a stage that gets no gradient from the next
NO_EDGES = EdgeRequests()


@dataclass(frozen=True)
class _Subject:
    """What is planned: options with the cuts filled in, their schedule, and the stages."""

    options: ScheduleOptions
    schedule: Schedule
    begins: tuple[str, ...]  # path of the first module, by stage
    stages: tuple[StageLoad, ...]
    parameters: tuple[tuple[ParameterFact, ...], ...]  # trained, by stage
    copies: tuple[tuple[ParameterFact, ...], ...]  # owned by an earlier stage, by stage


def plan_staged(case: Case, choice: Choice, ways: Ways = NO_WAYS, edges: EdgeRequests = NO_EDGES) -> Plan:
    """
    Args:
        choice: a schedule that cuts the model, with options if wanted (`ScheduleOptions`).
        ways: dense exchanges that are asked for, by parameter.
        edges: how what crosses between stages is coded.

    Raises:
        ValueError: options that do not go together, a cut that is no stage of the profile, or too few modules.
    """
    topology, profile = case.topology, case.profile
    options = edges.of(read(choice, topology.workers))
    subject = _subject(case, options)
    options = subject.options
    planned = Planned(options, subject.schedule, subject.stages, topology.workers, profile.running)
    counts = planned.counts
    groups = tuple(group for j in range(options.stages) for group in _dense(j, subject, counts, ways, case))
    return Plan(
        mesh=options.mesh(topology.workers),
        groups=groups,
        model_fingerprint=profile.model_fingerprint,
        topology_fingerprint=topology.fingerprint,
        workers_per_node=topology.workers_per_node,
        schedule=Choice(options.name, options.as_options()),
        stages=tuple(_stage_plan(j, subject) for j in range(options.stages)),
        consensus="same" if options.method.replicates_table else "owners",
        compute_seconds=counts.pace([stage.seconds for stage in subject.stages]),
        activation_bytes=counts.peak(subject.stages),
        notes=(
            *notes_on(planned),
            *notes_on_edges(options),
            *_notes_on_copies(subject),
            *_notes_on_tables(case),
        ),
        priced_with=case.assumptions.as_fields(),
    )


@dataclass(frozen=True)
class StagedWay:
    """A schedule that keeps a stage on each worker, and what its fullest worker then holds."""

    choice: Choice
    departures: tuple[str, ...]
    held_bytes: float


def staged_ways(case: Case) -> Iterator[StagedWay]:
    """Every schedule that keeps one stage on each worker, exact ones first; none where there are too few modules."""
    found = []
    for name, method in SCHEDULES.all().items():
        workers = case.topology.workers
        if not method.is_cut or method.replicates_table or method.axis != STAGE:
            continue
        try:
            if read(Choice(name), workers).stages != workers:  # several workers share a stage
                continue
            subject = _subject(case, read(Choice(name), case.topology.workers))
        except ValueError:
            continue
        if subject.schedule.uncoupled:
            continue
        departures = ("stale",) if subject.schedule.stale_share else ()
        found.append(StagedWay(Choice(name), departures, max(_held(subject, case))))
    yield from sorted(found, key=lambda way: (way.departures, way.held_bytes))


def _held(subject: _Subject, case: Case) -> Iterator[float]:
    """What each worker holds: weights, gradients, state and activations."""
    counts = counted(subject.options)
    for j, load in enumerate(subject.stages):
        held = (*subject.parameters[j], *subject.copies[j])
        weights = load.weight_bytes * copies_held(subject.options, j, 1, case.slots_of(held))
        yield weights + counts.peak(subject.stages, subject.options.where.owner(j))


def _dense(j: int, subject: _Subject, counts: Counts, ways: Ways, case: Case) -> Iterator[Group]:
    """The first of them is charged with what the schedule's own messages carry, see `charged_to`."""
    options, load, schedule = subject.options, subject.stages[j], subject.schedule
    layout: Layout = "replicated" if options.method.replicates_table else "stage_sharded"
    parts = parts_of_stage(subject.parameters[j], options, case.topology, ways)
    count = sum(len(part.facts) for part in parts)
    holding = [i for i in range(options.stages) if subject.parameters[i]]
    passed = Forecast()
    for i in range(options.stages):
        if charged_to(i, holding) == j:
            passed = passed + _passed(i, subject, counts, case)
    for place, part in enumerate(parts):
        forecast = _forecast(j, part, subject, case)
        departures = ("stale",) * (schedule.stale_share > 0) + ("uncoupled",) * (j in schedule.uncoupled)
        yield Group(
            name=f"stage {j}" + (f", bucket {place}" if len(parts) > 1 else ""),
            parameters=tuple(fact.name for fact in part.facts),
            layout=layout,
            exchange=part.exchange,
            stage=j,
            departures=(*departures, *departures_of(part.exchange)),
            forecast=forecast if place else forecast + passed,
            reason=f"from {load.first}" + (f" to {load.last}" if count > 1 else ""),
        )


def _stage_plan(j: int, subject: _Subject) -> StagePlan:
    load = subject.stages[j]
    cost = Forecast(seconds=load.seconds, peak_bytes=load.activation_bytes + load.cache_bytes)
    edge = subject.options.edges[j] if subject.options.edges else Edge()
    plain = StagePlan(subject.begins[j], edge=edge.forward, edge_back=edge.back, forecast=cost)
    if j in subject.schedule.uncoupled:
        plain = replace(plain, objective=OWN_LOSS)
    apart = subject.options.method.residency.activations(subject.options).get(j)
    if apart is not None:
        plain = replace(plain, residency=Choice(apart.name))
    return replace(plain, residency=RECOMPUTE) if j in subject.options.recompute else plain


def _subject(case: Case, options: ScheduleOptions) -> _Subject:
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
    copies: list[list[ParameterFact]] = [[] for _ in parts]
    for fact in profile.parameters:
        if fact.requires_grad:
            uses = uses_of(fact, owner)
            _refuse_tie(uses, options, case.topology.workers)
            first = uses[0].stage if len(uses) > 1 else owner[_stage_of(fact, profile)]
            parameters[first].append(fact)
            for use in uses[1:]:
                copies[use.stage].append(fact)
    every = zip(parts, parameters, copies, strict=True)
    loads = tuple(_load(part, [*own, *copied], case) for part, own, copied in every)
    begins = tuple(part[0].name for part in parts)
    loads = loads_with_edges(loads, options, case)
    owned, copied = tuple(map(tuple, parameters)), tuple(map(tuple, copies))
    return _Subject(options, options.schedule(), begins, loads, owned, copied)


def _refuse_tie(uses: Sequence[ParameterUse], options: ScheduleOptions, workers: int) -> None:
    """
    Raises:
        ValueError: several stages hold the parameter, and its copies would not be kept alike.
    """
    for use in uses[1:]:
        if said := complaint(options, workers, uses[0], use):
            raise ValueError(said)


def _notes_on_copies(subject: _Subject) -> Iterator[str]:
    for stage, facts in enumerate(subject.copies):
        for fact in facts:
            first = next(j for j, own in enumerate(subject.parameters) if fact in own)
            yield (
                f"stages {first} and {stage} share {fact.name}: each has a copy and its optimizer state; the sum of "
                f"both gradients is made in stage {first} before every step"
            )


def _notes_on_tables(case: Case) -> Iterator[str]:
    """Of those that would go by row in a loop of the user's own, if that is cheaper."""
    trained = [fact for fact in case.profile.parameters if fact.requires_grad and fact.shardable]
    tables = [fact.name for fact in trained if not case.assumptions.of(fact.name).stays_whole]
    if tables and case.topology.workers > 1:
        yield f"a schedule keeps tables whole: {', '.join(tables)}; without one they may go by row"


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
        seconds=computed + landing_seconds(facts, case),
        weight_bytes=sum(fact.bytes for fact in facts),
        count_bytes=reduced_bytes(facts) - sum(fact.bytes for fact in facts),
        activation_bytes=sum(unit.activation_bytes for unit in part),
        output_bytes=part[-1].output_bytes,
        output_numbers=part[-1].output_numbers,
    )


def _forecast(j: int, part: GroupPart, subject: _Subject, case: Case) -> Forecast:
    """Mean over workers. Memory of weights: the working copy, an older version where one is read, gradient, state."""
    options, workers = subject.options, case.topology.workers
    across = workers // options.replicas(workers)
    held = copies_held(options, j, across, case.slots_of(part.facts))
    copied = [fact for facts in subject.copies for fact in facts if fact in part.facts]
    weights = Forecast(memory_bytes=held * sum(fact.bytes for fact in (*part.facts, *copied)))
    if part.exchange is None:
        return weights
    crossed = crossing(part.facts, part.exchange, options, case)
    return weights + Forecast(crossed.sent_bytes / across, crossed.kept_bytes / across, crossed.seconds)


def _passed(j: int, subject: _Subject, counts: Counts, case: Case) -> Forecast:
    """What a stage's messages take, mean over workers."""
    options, load, topology = subject.options, subject.stages[j], case.topology
    across = topology.workers // options.replicas(topology.workers)
    messages = [one for one in counts.sent if one.stage == j]
    shared = 2 * reduced_bytes(subject.copies[j])  # a copy's gradients on their way to the owner, and their sums back
    if not messages:
        return Forecast()
    below, codes = subject.stages[max(0, j - 1)], codes_of(options.edges)
    # behind gradients that are summed a count per parameter travels
    bytes_of: dict[str, float] = {
        "weights": load.weight_bytes,
        "partial gradient": load.weight_bytes + load.count_bytes,
        "gradient": load.weight_bytes + load.count_bytes,
        "activation": sent_over(codes.get(("activation", j)), load),
        "activation gradient": sent_over(codes.get(("activation gradient", j)), below),
        "norm": NORM_BYTES,
        **dict.fromkeys(TOKENS.values(), load.weight_bytes),
    }
    passed = sum(one.times * bytes_of[one.what] for one in messages)
    sent = (passed + shared) / across
    count = round(sum(one.times for one in messages)) + 2 * bool(shared)
    return Forecast(sent, 0.0, topology.link.seconds(sent, count))
