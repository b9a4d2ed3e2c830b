"""A plan without a common clock: what owners hold and send, what it would bring, and where it can only lose.

What is read by row alone goes by row; all else is whole, and pulled in every step.

Source: Parallax (Kim et al., 2019), asynchronous training.
"""

from dataclasses import replace

from armillary.planning.owner_clock import OwnerCosts, costs_of, round_seconds
from armillary.planning.pricing import Case
from armillary.planning.quicker_ways import all_reduce_seconds
from armillary.plans.group import Forecast, Group
from armillary.plans.plan import Plan
from armillary.plans.profile import ParameterFact
from armillary.plans.registry import Choice
from armillary.plans.units import seconds_text
from armillary.schedules.costs import Planned
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.notes import notes_on
from armillary.schedules.registry import read

__all__ = ["plan_owned"]

GAIN = 1.05  # times plain updates a second: less is none


def plan_owned(case: Case, choice: Choice, plain_seconds: float) -> Plan:
    """
    Args:
        choice: the schedule, with options. plain_seconds: of a step of the plan without it.

    Raises:
        ValueError: an option that there is not, or that cannot be.
    """
    topology, options = case.topology, read(choice, case.topology.workers)
    groups = _groups(case)
    made = Plan(
        mesh=options.mesh(topology.workers),
        groups=groups,
        model_fingerprint=case.profile.model_fingerprint,
        topology_fingerprint=topology.fingerprint,
        workers_per_node=topology.workers_per_node,
        schedule=Choice(options.name, options.as_options()),
        consensus="owners",
        compute_seconds=sum(stage.forward_seconds + stage.backward_seconds for stage in case.profile.stages),
        activation_bytes=float(case.profile.peak_bytes),
        priced_with=case.assumptions.as_fields(),
    )
    rates = topology.rates or (1.0,) * topology.workers
    seconds = round_seconds(costs_of(groups, case), rates, options.bound)
    planned = Planned(options, options.schedule(), (), topology.workers, case.profile.running)
    notes = notes_on(planned)
    if topology.workers > 1:
        notes = (*notes, *_worth(made, options, case, plain_seconds))
    return replace(made, step_seconds=seconds, all_reduce_seconds=all_reduce_seconds(made, case), notes=notes)


def _goes_by_row(fact: ParameterFact, case: Case) -> bool:
    upkeep = case.assumptions.of(fact.name)
    return fact.shardable and not (upkeep.mixes_rows or upkeep.stays_whole or upkeep.lists_rows)


def _groups(case: Case) -> tuple[Group, ...]:
    trained = [fact for fact in case.profile.parameters if fact.requires_grad]
    tables = [fact for fact in trained if _goes_by_row(fact, case)]
    whole = tuple(fact.name for fact in trained if fact not in tables)
    groups = [_table(fact, case) for fact in tables]
    if whole:
        why = "read whole: pulled in every step, each with one owner"
        groups.append(Group("whole", whole, "replicated", None, departures=("async",), reason=why))
    costs = costs_of(groups, case)
    return tuple(replace(group, forecast=_forecast(group, costs, case)) for group in groups)


def _table(fact: ParameterFact, case: Case) -> Group:
    lazy = ("lazy",) if case.assumptions.of(fact.name).moves_quiet_rows else ()
    why = "read by row only: its rows are dealt to all ranks"
    return Group(fact.name, (fact.name,), "row_sharded", None, departures=("async", *lazy), reason=why)


def _forecast(group: Group, costs: OwnerCosts, case: Case) -> Forecast:
    facts, count = [case.profile.parameter(name) for name in group.parameters], case.topology.workers
    slots = case.assumptions.of(facts[0].name).optimizer_slots
    nbytes = sum(fact.bytes for fact in facts)
    copies = 2 * nbytes * (facts[0].alpha if group.layout == "row_sharded" else 1.0)  # pulled, and their gradients
    share = costs.sent_bytes[group.name] / (sum(costs.sent_bytes.values()) or 1.0)
    return Forecast(
        costs.sent_bytes[group.name],
        copies + (1 + slots) * nbytes / count,
        share * (costs.pull + costs.push + costs.served),
    )


def _worth(made: Plan, options: ScheduleOptions, case: Case, plain_seconds: float) -> list[str]:
    """What it would bring on these ranks, against the plan that waits for all in every step."""
    rates = case.topology.rates or (1.0,) * case.topology.workers
    free, bound = (round_seconds(costs_of(made.groups, case), rates, one) for one in (None, options.bound))
    said = [_gain(bound, plain_seconds, rates)]
    if options.bound is not None and max(rates) > 1:
        said.append(
            f"a bound makes all as slow as the slowest in the long run; with bound=None a round of updates would take "
            f"{seconds_text(free)}, not {seconds_text(bound)}"
        )
    sizes = {group.name: sum(case.profile.parameter(name).bytes for name in group.parameters) for group in made.groups}
    if whole := sum(sizes[group.name] for group in made.groups if group.layout == "replicated"):
        said.append(f"{whole / sum(sizes.values()):.0%} of the weights are read whole, and pulled in every step")
    return said


def _gain(seconds: float, plain: float, rates: tuple[float, ...]) -> str:
    if max(rates) == 1:  # what a clock makes of latencies decides nothing here: there is no waiting to be saved
        return (
            "on ranks that are equally fast, as these are, nobody is waited for long, so it can only lose: the plan "
            "without a schedule is exact. It gains where ranks are slow by turns, which no measurement foresees"
        )
    times = plain / seconds
    figures = f"{times:.2f} times the samples a second of the plan without a schedule ({seconds_text(plain)} a round)"
    measured = f"these ranks, whose steps take {', '.join(f'{rate:g}' for rate in rates)} times the fastest one's,"
    if times > GAIN:
        return f"on {measured} it is expected to bring {figures}"
    return f"on {measured} it can only lose: {figures} are expected"
