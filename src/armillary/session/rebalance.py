"""Asks again, while a run trains, who should own the rows of its tables, and moves those that had better move.

A plan is made from a few batches before training. Later batches may ask for other rows, and then one owner serves most
of what is read. So alpha and the load of owners are measured again, from steps just made; tables are priced anew; one
that is forecast to gain clearly is moved, bit for bit. What was found is told either way.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from armillary.facts.plan import Choice, Plan
from armillary.facts.profile import Profile
from armillary.facts.topology import Topology
from armillary.planning.demand import Constraint
from armillary.planning.owners import MARGIN, Repriced, reprice, still_allowed, with_owners
from armillary.planning.pricing import Case, assumptions_behind
from armillary.planning.request import NO_CONSTRAINTS
from armillary.session.engines.user_loop import UserLoop
from armillary.session.events import Rebalanced, Remeasured
from armillary.session.move import move, unfinished
from armillary.session.rank_zero import by_rank_zero
from armillary.session.remeasure import Looked, imbalance, looked_up, remeasured, sampled

__all__ = ["owners_of", "rebalance", "restore_owners"]


class _Decided(NamedTuple):
    """What rank 0 found out; plan and profile are JSON, since they cross to the other ranks."""

    tables: tuple[Remeasured, ...]
    profile: str
    plan: str


def rebalance(
    run: UserLoop,
    profile: Profile,
    topology: Topology,
    *,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    margin: float = MARGIN,
) -> Rebalanced:
    """Collective, between two steps: measures, prices and, where it is clearly better, moves tables to other owners.
    `run.plan` is the plan in force afterwards. Exact: weights and optimizer state move bit for bit. (Later steps may
    differ by rounding where it depends on who owns a row: norms over all gradients, as clipping asks for them, are
    added up owner by owner; torch's fused optimizers on the CPU round the end of a tensor otherwise.)

    Nothing moves while gradients wait for their exchange or their step; the answer says so.

    Args:
        profile, topology: what the plan was made from; or of the last call's answer.
        constraints: as in `plan`. A table may be pinned to its owners by naming its exchange with all options.
        margin: share of its present seconds that a table must be forecast to save to be moved.

    Raises:
        ValueError: ranks are at different steps, the topology is of another job, or nobody priced the plan.
    """
    everyones = run.transport.share((run.transport.step, unfinished(run), sampled(run)))
    steps = [step for step, _, _ in everyones]
    if len(set(steps)) > 1:
        raise ValueError(f"rebalance: ranks are at different steps {steps} (rank order); call it alike on every rank")
    waits = [f"on rank {rank} {why}" for rank, (_, why, _) in enumerate(everyones) if why]
    if waits:
        return Rebalanced(steps[0], (), profile, run.plan, waits[0])
    looked = looked_up([mine for _, _, mine in everyones])
    case = Case(profile, topology, assumptions_behind(run.plan))
    found = by_rank_zero(run.transport, lambda: _decided(run, looked, case, constraints, margin))
    owners = {one.table: one.after for one in found.tables if one.has_moved}
    move(run, owners)
    if owners:
        run.plan = Plan.from_json(found.plan)
    remark = "" if found.tables else "no table with owners was read in a sampled step"
    return Rebalanced(steps[0], found.tables, Profile.from_json(found.profile), run.plan, remark)


def _decided(
    run: UserLoop, looked: Looked, case: Case, constraints: Mapping[str, Constraint], margin: float
) -> _Decided:
    if not looked:
        return _Decided((), case.profile.to_json(), run.plan.to_json())
    seen = Case(remeasured(case.profile, looked, run.transport.place), case.topology, case.assumptions)
    priced = reprice(run.plan, seen, constraints, looked.keys(), margin)
    tables = tuple(_told(one, run, looked, seen.profile) for one in priced)
    moving = [one for one in tables if one.has_moved]
    notes = [f"owners after step {run.transport.step}: {one}" for one in moving]
    plan = with_owners(run.plan, seen, {one.table: one.after for one in moving}, notes) if moving else run.plan
    return _Decided(tables, seen.profile.to_json(), plan.to_json())


def _told(one: Repriced, run: UserLoop, looked: Looked, profile: Profile) -> Remeasured:
    rows = profile.parameter(one.table).rows
    assert rows is not None, one
    return Remeasured(
        table=one.table,
        alpha=rows.alpha_worker,
        imbalance=imbalance(looked[one.table], run.tables[one.table].ownership),
        before=one.before.choice,
        after=one.after.choice,
        before_seconds=one.before.forecast.seconds,
        after_seconds=one.after.forecast.seconds,
    )


def owners_of(plan: Plan, tables: Iterable[str], profile: Profile) -> dict[str, Any]:
    """Who owns the rows of these tables, and the facts that decided it, for a checkpoint: plain values, read by
    `restore_owners`."""
    kept = {name: asdict(plan.group_of(name).own_exchange) for name in sorted(tables)}
    return {"workers": plan.workers, "tables": kept, "profile": profile.to_json()}


def restore_owners(
    run: UserLoop, kept: Mapping[str, Any], profile: Profile, topology: Topology, constraints: Mapping[str, Constraint]
) -> Rebalanced | None:
    """Collective, between two steps: gives tables the owners that an earlier part of this run left them with. None,
    and nothing done, where that was on another number of workers or changes nothing.

    Args:
        kept: what `owners_of` gave. profile: of the plan; its row facts give way to those kept. constraints: they win.
    """
    if kept["workers"] != run.workers:
        return None
    left = {table: Choice.of_fields(choice) for table, choice in kept["tables"].items()}
    seen = Profile.from_json(kept["profile"])
    profile = replace(profile, parameters=seen.parameters, batches=seen.batches)
    case = Case(profile, topology, assumptions_behind(run.plan))
    owners = still_allowed(run.plan, case, constraints, left)
    if not owners:
        return None
    step = run.transport.step
    said = ", ".join(f"{table} by {choice}" for table, choice in owners.items())
    remark = f"{said}, as the checkpoint left them"
    plan = with_owners(run.plan, case, owners, [f"owners after step {step}: {remark}"])
    move(run, owners)
    run.plan = plan
    return Rebalanced(step, (), profile, plan, remark)
