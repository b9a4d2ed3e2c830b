"""How often each mechanism of a plan acted while it was verified: what never did was not held to anything.

An exchange says in words what it does, and tells of a push what of that it did (`DenseExchange.mechanisms`,
`RowExchange.mechanisms`). Here it is added up, over groups of one exchange and over ranks. Coded edges count the
tensors that they sent (`TrainSpec.counted`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from armillary.exchanges.dense import DenseExchange, Moved, Pushed
from armillary.exchanges.exchange import dense_exchanges
from armillary.exchanges.parcel import Parcel, State
from armillary.exchanges.rank_info import RankInfo
from armillary.facts.choice import Choice
from armillary.facts.collectives import Program
from armillary.facts.layout import Layout
from armillary.facts.plan import Plan
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.runtime.hybrid.executor import RowUnit
from armillary.runtime.hybrid.table import RowTable
from armillary.schedules.edge import SAME, hurried_edge, warm_up_of
from armillary.session.engines.owned_loop import OwnedLoop
from armillary.session.run import Run

__all__ = ["Acts", "acts_of", "edge_acts", "hurried", "lowered", "watched"]

Acts = Counter[tuple[str, str]]  # by exchange and mechanism


def hurried(plan: Plan) -> Plan:
    """The plan with every start, lifespan, size limit and warm-up lowered as far as exchanges and edges say."""
    known = dense_exchanges()
    for group in plan.groups:
        if group.exchange is not None and group.exchange.name in known:
            lowered = known[group.exchange.name].hurried(group.exchange.options)
            plan = plan.with_group(replace(group, exchange=Choice(group.exchange.name, dict(lowered))))
    stages = [
        replace(stage, edge=hurried_edge(stage.edge), edge_back=hurried_edge(stage.edge_back)) for stage in plan.stages
    ]
    return replace(plan, stages=tuple(stages))


def lowered(asked: Plan, plan: Plan) -> tuple[str, ...]:
    """What `hurried` made other than it was asked for, in words."""
    pairs = [(was.exchange, now.exchange) for was, now in zip(asked.groups, plan.groups, strict=True)]
    for was, now in zip(asked.stages, plan.stages, strict=True):
        pairs += [(was.edge, now.edge), (was.edge_back, now.edge_back)]
    return tuple(dict.fromkeys(f"{was} to {now}" for was, now in pairs if was != now))


def watched(run: Run) -> Acts:
    """Counts from now on what this rank's groups do."""
    acts, groups = Acts(), {group.name: str(group.exchange) for group in run.plan.groups}
    for unit in run._engine.units:
        exchange = groups.get(unit.name, "")
        if isinstance(unit, DenseUnit):
            layout = unit.bucket.layout
            unit.exchange = _told_of_pushes(unit.exchange, exchange, layout, run.workers, acts)
            told = {
                scope: _told_of_pushes(one, exchange, layout, run.workers, acts) for scope, one in unit.beside.items()
            }
            unit.beside.update(told)
        elif isinstance(unit, RowUnit):
            _tell_of_rows(unit.table, exchange, acts)
    return acts


def edge_acts(run: Run) -> Acts:
    """What this rank's coded edges did up to now; all that the plan names, whether it was done or not."""
    found = Acts()
    if not isinstance(run._engine, OwnedLoop):
        return found
    counted = run._engine.parts.spec.counted
    for stage, row in enumerate(run.plan.stages):
        back = row.edge if row.edge_back == SAME else row.edge_back
        ways = (("edge", row.edge, "activation", stage), ("edge_back", back, "activation gradient", stage + 1))
        for option, choice, what, made in ways:
            if choice is not None:
                name = f"{option} of stage {stage}: {getattr(row, option)}"
                found[name, f"{what}s coded"] = counted[what, made, True]
                if warm_up_of(choice):
                    found[name, f"{what}s sent as they are, in the warm-up"] = counted[what, made, False]
    return found


def acts_of(everyones: Sequence[Mapping[tuple[str, str], int]]) -> Acts:
    """Added up over ranks."""
    found = Acts()
    for one in everyones:
        found.update(one)
    return found


def _told_of_pushes(exchange: DenseExchange, name: str, layout: Layout, workers: int, acts: Acts) -> DenseExchange:
    told = exchange.mechanisms(layout, workers)
    acts.update({(name, mechanism): 0 for mechanism in told})

    def push(parcel: Parcel, state: State, place: RankInfo) -> Program[Moved]:
        moved = yield from exchange.push(parcel, state, place)
        pushed = Pushed(parcel.layout, place.workers, state, moved[1])
        acts.update({(name, mechanism): times(pushed) for mechanism, times in told.items()})
        return moved

    return exchange._replace(push=push)


def _tell_of_rows(table: RowTable, name: str, acts: Acts) -> None:
    exchange, read, take = table.exchange, table.reads, table.exchange.push

    def note(pulled: int, pushed: int) -> None:
        acts.update({(name, what): times for what, times in exchange.mechanisms(pulled, pushed).items()})

    def reads(one: RowTable, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows, inverse = read(one, ids)
        note(len(rows), 0)
        return rows, inverse

    def push(gradients: Sequence[Tensor], *rest: Any) -> Program[tuple[Tensor, Tensor]]:
        note(0, sum(map(len, gradients)))
        return take(gradients, *rest)

    table.reads, table.exchange = reads, exchange._replace(push=push)
    note(0, 0)
