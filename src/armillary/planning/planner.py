"""From a profile and a topology to a plan: enumerate, price, keep what fits, take the cheapest, say why.

`plan` prices every way each table may cross the workers; nearly dense tables go dense because the price says so. How
large buckets are the simulated step decides. `plan_by_rule` decides by Parallax's rule alone, and forecasts;
`plan(rule="parallax")` adds its search for the number of owners. All honour the user's constraints or refuse them.

Source: the choice per parameter is Parallax's (Kim et al., EuroSys 2019); enumerate, price and choose is TorchRec's
planner. Departure from the latter: alpha is measured on real batches instead of being a constraint fed by hand.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from armillary.exchanges.dense import why_not_beside
from armillary.exchanges.exchange import build_dense, consensus_of, dense_exchanges, row_exchanges
from armillary.planning.candidates import Candidate, Question, candidate, default_limits, peak_bytes, ruled
from armillary.planning.constraints import (
    LISTED,
    allows,
    coded_beside,
    departs,
    layout_of,
    names_of,
    plain,
    resolve,
)
from armillary.planning.demand import PRICE, Constraint
from armillary.planning.grouping import WHOLE, by_clock, groups, sizes
from armillary.planning.memory import NothingFits, cheapest, fit, margin, menu, refuse_too_large
from armillary.planning.notes import (
    Verdict,
    departing,
    reason,
    verdicts,
    with_allowed,
    with_edges_weighed,
    with_named_weighed,
    with_taken,
)
from armillary.planning.owner_plan import plan_owned
from armillary.planning.partition_search import OwnerSearch, SearchedTable, by_forecast, note, searched_tables
from armillary.planning.prefetch import looking_ahead, prefetching_as_asked, prefetching_by_price
from armillary.planning.pricing import ADAM, Assumptions, Case
from armillary.planning.quicker_ways import (
    WORTH,
    fitting,
    may_cut,
    quickest_loop,
    step_seconds,
    stepping,
    with_expected,
    with_quickest,
    with_slower_said,
)
from armillary.planning.request import NO_CONSTRAINTS, PlanRequest, named, staged_request
from armillary.planning.stage_costs import EdgeRequest
from armillary.planning.stage_plan import plan_staged, plan_uncut
from armillary.plans.mesh import Mesh
from armillary.plans.plan import SIMULTANEOUS, Mean, Plan
from armillary.plans.plan_text import REWRITTEN
from armillary.plans.profile import Profile
from armillary.plans.registry import Choice, exact_keywords
from armillary.plans.topology import Topology
from armillary.schedules.registry import read, why_not_carried

__all__ = [
    "bucketings",
    "explain",
    "make_plan",
    "notes_on_hosts",
    "plan",
    "plan_by_rule",
    "tables_to_search",
    "with_other_way",
]

NONE_SEARCHED: Mapping[str, OwnerSearch] = MappingProxyType({})


@exact_keywords
def plan(
    profile: Profile,
    topology: Topology,
    *,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    lazy: Collection[str] = (),
    mean: Mean = "workers",
    assumptions: Assumptions = ADAM,
    schedule: Choice | str = SIMULTANEOUS,
    prefetch: bool | None = False,
    steps_by_run: bool = False,
    micro_batches: int | None = None,
    allow: Collection[str] = (),
    rule: str = PRICE,
    edge: EdgeRequest = None,
    edge_back: EdgeRequest = None,
) -> Plan:
    """The cheapest plan that fits; under another rule, the one that it makes.

    Args:
        constraints: name, alias or glob pattern -> layout, or exchange, as text or as a `Choice`.
        lazy: names or patterns of tables whose rows without gradient may stay put (NOT exact).
        assumptions: what the optimizer keeps and how fast a rank's processor is.
        schedule: by name, as in "ring(slack=1)" or Choice("ring", {"slack": 1}). Under one that owns the loop
            (`run.step`) tables are kept whole, and mean must be left alone.
        prefetch: look-ups leave before their batch, in a loop over `run.batches`. None: where a step is shorter for it.
        steps_by_run: steps are taken by `run.step`, so an exact schedule that owns the loop may be chosen by price.
            Else a note says what it would bring.
        micro_batches: of a step and data coordinate, where the caller cuts them; a batch of the profile is one of them.
        allow: departures from exact among which the plan may choose, by the simulated step: ("lossy",) or none. What is
            named in constraints needs no other permission.
        rule: "price", or "parallax": tables that are only read by row go by their owners, as many as its search finds,
            everything else by all-reduce.
        edge, edge_back: codecs of what stages of a pipeline hand on and get back (NOT exact): one, or by stage.

    Raises:
        ValueError: a constraint names no parameter or cannot be honoured; or nothing fits, with what would.
    """
    request = PlanRequest(
        constraints, lazy, mean, named(schedule), prefetch, steps_by_run, micro_batches, allow, rule, edge, edge_back
    )
    return make_plan(Case(profile, topology, assumptions), request)


def make_plan(case: Case, request: PlanRequest, timed: Mapping[str, OwnerSearch] = NONE_SEARCHED) -> Plan:
    """
    Args:
        timed: of rule "parallax", searches over exchanges that a job timed, by table; the others go by forecast.

    Raises:
        ValueError: as `plan`.
    """
    made = _made(case, request, timed)
    return replace(made, notes=(*made.notes, *notes_on_hosts(case.topology)))


def notes_on_hosts(topology: Topology) -> list[str]:
    """What a plan leaves out because hosts hold different numbers of ranks."""
    if not topology.uneven_hosts:
        return []
    return [
        f"hosts hold {', '.join(map(str, topology.uneven_hosts))} ranks: each rank is planned as a node of its own, so "
        "nothing is summed inside a host first; start as many ranks on every host to change that"
    ]


def _made(case: Case, request: PlanRequest, timed: Mapping[str, OwnerSearch]) -> Plan:
    schedule, topology = request.schedule, case.topology
    if request.method.owns_loop:
        is_cut = request.method.is_cut
        by_row = {} if is_cut else {"constraints": request.constraints, "lazy": request.lazy}
        _refuse_with_schedule(schedule, {**by_row, "mean": request.mean != "workers", "allow": request.allow})
        if is_cut:
            asked = staged_request(case, request)
            cut = partial(plan_staged, case, asked.schedule, asked.ways)
            made = cut(request.edges)
            made = with_expected(with_taken(replace(made, notes=(*made.notes, *asked.notes))), case)
            return with_edges_weighed(made, with_expected(cut(), case)) if request.edges else made
        if request.method.placement.deals_rows:
            plain = bucketings(case, replace(request, schedule=SIMULTANEOUS))[0]
            return plan_owned(case, schedule, with_expected(plain, case).step_seconds)
        return with_expected(plan_uncut(case, schedule), case)
    read(schedule, topology.workers)
    if why := why_not_carried(schedule):
        raise ValueError(f"plan: {why}")
    if request.rule != PRICE:
        question = _question(case, request)
        forecast = {table.name: by_forecast(table, question) for table in searched_tables(question)}
        made = plan_by_rule(case, request, {**forecast, **timed})
        return with_other_way(with_expected(_prefetched(made, request, case), case), case, request)
    micro_batches = request.micro_batches
    may_take = _is_free(request) and request.steps_by_run and may_cut(case, micro_batches)
    try:
        plain = bucketings(case, request)[0]
    except NothingFits:
        ways = fitting(case, micro_batches) if may_take else []
        if not ways:
            raise
        return ways[0].told(case)
    plain = _weighed(with_expected(_prefetched(plain, request, case), case), request, case)
    way = quickest_loop(case, micro_batches) if may_take and topology.workers > 1 else None
    if way is not None and step_seconds(plain, case) >= WORTH * way.seconds:
        return way.told(case)
    return with_other_way(plain, case, request)


def _is_free(request: PlanRequest) -> bool:
    """Nothing is asked for that no schedule that owns the loop honours."""
    return not request.constraints and request.mean == "workers"


def with_other_way(made: Plan, case: Case, request: PlanRequest) -> Plan:
    """The plan with a note on the other way that would shorten its step most.

    Args:
        made: a plan for a loop of the user's own.
    """
    if made.workers == 1:
        return made
    ways = [*departing(made, _question(case, request)), *looking_ahead(made, case)]
    ways += stepping(made, case, request.micro_batches) if _is_free(request) else []
    return with_quickest(made, ways)


def _prefetched(made: Plan, request: PlanRequest, case: Case) -> Plan:
    if request.prefetch is False:
        return made
    ahead = prefetching_as_asked if request.prefetch else prefetching_by_price
    return ahead(made, case.profile, case.topology)


def _weighed(made: Plan, request: PlanRequest, case: Case) -> Plan:
    """The plan with a note where an exact one would be quicker than what is named, or else plain all-reduce."""
    exactly = {pattern: way for pattern, way in request.constraints.items() if not departs(way)}
    if made.departures and len(exactly) < len(request.constraints) and made.workers > 1:
        asked = replace(request, constraints=exactly, allow=())
        try:
            exact = _bucketings(_question(case, asked), asked.mean)[0]
        except NothingFits:
            return made
        return with_named_weighed(made, with_expected(_prefetched(exact, asked, case), case))
    return with_slower_said(made, case, bool(request.constraints))


def bucketings(case: Case, request: PlanRequest) -> tuple[Plan, ...]:
    """The cheapest plan that fits, in buckets of every size that makes a difference, the one to take first."""
    question = _question(case, request)
    first, *others = _bucketings(question, request.mean)
    return with_allowed(first, question, request.allow), *others


def _bucketings(question: Question, mean: Mean) -> tuple[Plan, ...]:
    """Without a word of what is not exact."""
    case, topology = question.case, question.case.topology
    options = menu(question)
    free = cheapest(options, topology)
    chosen = fit(free, options, question)
    reasons = {fact.name: reason(fact, free, chosen, question) for fact in question.trained}
    sized = [replace(question, limits=limits) for limits in sizes(topology.backend)]
    return tuple(by_clock([_written(chosen, reasons, one, mean) for one in sized], case))


def plan_by_rule(case: Case, request: PlanRequest, searched: Mapping[str, OwnerSearch] = NONE_SEARCHED) -> Plan:
    """Parallax's rule for every parameter; constraints outweigh it.

    Args:
        searched: how many owners a table gets; a table that is not in it has all workers.

    Raises:
        ValueError: as `plan`.
    """
    question = _question(case, request)
    chosen, reasons = {}, {}
    for fact in question.trained:
        demanded, rule = question.wanted.get(fact.name), ruled(fact, question)
        if allows(demanded, rule):
            owned = searched[fact.name].choice if fact.name in searched else rule
            chosen[fact.name] = candidate(fact, owned, question)
            by_row = layout_of(rule) == "row_sharded"
            reasons[fact.name] = "Parallax's rule: read by row only" if by_row else WHOLE
        else:
            chosen[fact.name] = candidate(fact, _demanded_choice(demanded), question)
            reasons[fact.name] = f"by constraint {demanded}"
    refuse_too_large(chosen, question)
    made = _written(chosen, reasons, question, request.mean)
    made = replace(made, notes=(*made.notes, *(note(one, question) for one in searched.values())))
    return with_expected(made, case)


def tables_to_search(case: Case, request: PlanRequest) -> tuple[SearchedTable, ...]:
    """The tables of which rule "parallax" searches the number of owners."""
    return searched_tables(_question(case, request))


def explain(case: Case, request: PlanRequest) -> tuple[Verdict, ...]:
    """Every candidate of every parameter that is read by row, priced, with why it lost."""
    question = _question(case, request)
    options = menu(question)
    free = cheapest(options, case.topology)
    return verdicts(free, fit(free, options, question), question)


def _refuse_with_schedule(schedule: Choice, wanted: Mapping[str, Any]) -> None:
    """wanted: name -> what was asked, empty where nothing was."""
    if found := [name for name, asked in wanted.items() if asked]:
        raise ValueError(
            f"plan: under schedule {schedule} nothing goes by row, by weight or in code; {', '.join(found)} have no "
            "effect: drop them, or plan without a schedule"
        )


def _question(case: Case, request: PlanRequest) -> Question:
    wanted = resolve(request.constraints, case.profile, case.topology, case.against)
    quiet = names_of(request.lazy, case.profile.parameters)
    for name in sorted(quiet):
        if why := case.against(name, is_spread=True):
            raise ValueError(f"plan: {name!r} cannot be lazy: {why}; drop it from lazy")
    for name, constraint in wanted.items():
        if case.assumptions.of(name).lists_rows and not _lists(constraint):
            raise ValueError(
                f"plan: {name!r} cannot be {constraint}: its optimizer takes only gradients that list rows; drop the "
                "constraint for it"
            )
        if isinstance(constraint, Choice) and constraint.name in dense_exchanges():
            exchange = build_dense(constraint.name, **constraint.options)
            if why := why_not_beside(constraint, exchange, request.mean, case.topology.workers_per_node):
                raise ValueError(f"plan: {why}")
    return _rows_uncoded(Question(case, wanted, quiet, default_limits(case.topology.backend)), request)


def _rows_uncoded(question: Question, request: PlanRequest) -> Question:
    """A pattern that wants gradients coded means what does not travel by row."""
    beside = coded_beside(request.constraints, question.case.profile.parameters)
    others = {name: one for name, one in question.wanted.items() if name not in beside}
    if len(others) == len(question.wanted):
        return question
    free = cheapest(menu(replace(question, wanted=others)), question.case.topology)
    if request.rule != PRICE:
        free = {fact.name: candidate(fact, ruled(fact, question), question) for fact in question.trained}
    by_row = {name for name in beside if free[name].choice.name in row_exchanges()}
    return replace(question, wanted={name: one for name, one in question.wanted.items() if name not in by_row})


def _lists(constraint: Constraint) -> bool:
    """Whether what is demanded can give an optimizer a list of rows."""
    name = constraint.name if isinstance(constraint, Choice) else constraint
    return name not in dense_exchanges() or constraint == LISTED


def _demanded_choice(constraint: Constraint | None) -> Choice:
    """The simplest choice that a constraint the rule does not meet can mean."""
    if isinstance(constraint, Choice):
        return constraint
    assert constraint is not None
    return plain(constraint)


def _written(chosen: Mapping[str, Candidate], reasons: Mapping[str, str], question: Question, mean: Mean) -> Plan:
    profile, topology = question.case.profile, question.case.topology
    ordered = groups(chosen, reasons, question)
    return Plan(
        mesh=Mesh.of(data=topology.workers),
        groups=ordered,
        consensus=consensus_of(ordered),
        model_fingerprint=profile.model_fingerprint,
        topology_fingerprint=topology.fingerprint,
        workers_per_node=topology.workers_per_node,
        mean=mean,
        compute_seconds=sum(stage.forward_seconds + stage.backward_seconds for stage in profile.stages),
        notes=_notes(chosen, question),
        priced_with=question.case.assumptions.as_fields(),
        activation_bytes=peak_bytes(ordered, question.case),
    )


def _notes(chosen: Mapping[str, Candidate], question: Question) -> tuple[str, ...]:
    profile, topology = question.case.profile, question.case.topology
    notes = []
    seen, asked = (profile.workers, profile.workers_per_node), (topology.workers, topology.workers_per_node)
    if profile.row_bytes and seen != asked:
        notes.append(
            f"row facts were taken with {seen[0]} workers in nodes of {seen[1]}; merged rows of {asked[0]} in nodes of "
            f"{asked[1]} are extrapolated"
        )
    if topology.workers > 1 and topology.scatter and any(fact.shardable for fact in question.trained):
        notes.append(
            f"prices that differ by less than {margin(topology):.0%} are not told apart (scatter of what was measured);"
            " of such ways the one that holds less is taken"
        )
    if whole := sorted(name for name in question.lazy if "lazy" not in chosen[name].departures):
        notes.append(f"lazy was allowed but is not used, since they travel whole: {', '.join(whole)}")
    if topology.workers > 1 and (written := [fact.name for fact in profile.parameters if fact.is_rewritten]):
        notes.append(
            f"{REWRITTEN} {', '.join(written)} (max_norm does), on each worker by what that one read, so the workers' "
            "copies drift apart"
        )
    notes += _of_optimizers(question)
    if unread := [fact.name for fact in question.trained if fact.arrival is None]:
        notes.append(f"no gradient was seen in the profile: {', '.join(unread)}")
    return tuple(notes)


def _of_optimizers(question: Question) -> list[str]:
    """What is to be known of those that do not step each row of a table by itself, whether it has a gradient or not."""
    upkeep = {fact: question.case.assumptions.of(fact.name) for fact in question.trained}
    mixing: dict[str, list[str]] = {}
    for fact, one in upkeep.items():
        if one.mixes_rows and fact.shardable and question.case.topology.workers > 1:
            mixing.setdefault(one.mixes_rows, []).append(fact.name)
    listed = [fact.name for fact, one in upkeep.items() if one.lists_rows]
    notes = [f"{', '.join(names)} not spread by row: {why}" for why, names in mixing.items()]
    if listed:
        notes.append(
            f"lazy rows of {', '.join(listed)}: their optimizer takes only gradients that list rows (sparse=True) and "
            "leaves all other rows alone, here as in one process"
        )
    return notes
