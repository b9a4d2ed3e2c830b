"""What came of a comparison with one process: a difference for every parameter, the verdict, and what was tried.

An exchange says in words what it does (`DenseExchange.mechanisms`, `RowExchange.mechanisms`), and how often each push
did it. Counts are summed over groups of one exchange and over ranks. Coded edges count the tensors that they sent. What
never acted was compared with nothing.

`judged` gives the verdict on every tensor that a rank holds at the end of both trainings. How a plan is trained, and
which truth it has, `verifiers.py` says for each way to take steps.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR

from armillary.exchanges.dense import CompletedPush, DenseExchange, PushResult
from armillary.exchanges.exchange import dense_exchanges
from armillary.plans.parcel import Layout, Parcel, RankInfo, State
from armillary.plans.plan import Plan
from armillary.plans.plan_text import number_of
from armillary.plans.registry import Choice
from armillary.plans.requests import Program
from armillary.plans.units import Page, Table, page_text
from armillary.runtime.dense_unit import DenseUnit
from armillary.runtime.executor import RowUnit
from armillary.schedules.edges import SAME, codes_of, hurried_edge, warm_up_of
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.registry import options_of
from armillary.session.double_precision import is_repeatable
from armillary.session.run import Run
from armillary.session.schedule_engine import OwnedLoop
from armillary.session.truth import Truth
from armillary.session.workload import Batch, TrainBatches, Workload
from armillary.tables.table import RowTable

__all__ = [
    "BESIDE",
    "RATE_DROP",
    "TOLERANCE",
    "Acted",
    "Acts",
    "Begun",
    "Difference",
    "Judged",
    "TrainedCase",
    "Verdict",
    "Verification",
    "VerifiedCase",
    "acts_of",
    "apart",
    "edge_acts",
    "judged",
    "lowered",
    "shortened",
    "watched",
]

Acts = Counter[tuple[str, str]]  # by exchange and mechanism


def shortened(plan: Plan) -> Plan:
    """The plan with every start, lifespan, size limit and warm-up lowered as far as exchanges and edges say."""
    known = dense_exchanges()
    for group in plan.groups:
        if group.exchange is not None and group.exchange.name in known:
            lowered = known[group.exchange.name].shortened(group.exchange.options)
            plan = plan.with_group(replace(group, exchange=Choice(group.exchange.name, dict(lowered))))
    stages = [
        replace(stage, edge=hurried_edge(stage.edge), edge_back=hurried_edge(stage.edge_back)) for stage in plan.stages
    ]
    return replace(plan, stages=tuple(stages))


def lowered(asked: Plan, plan: Plan) -> tuple[str, ...]:
    """What `shortened` made other than it was asked for, in words."""
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

    def push(parcel: Parcel, state: State, place: RankInfo) -> Program[PushResult]:
        moved = yield from exchange.push(parcel, state, place)
        pushed = CompletedPush(parcel.layout, place.workers, state, moved[1])
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


TOLERANCE = 1e-10
BESIDE = "stages beside the whole model"
NOTHING_JUDGED = "nothing judged, so neither equal nor not"

Verdict = Literal["equal", "differs", "no gradient"]


@dataclass(frozen=True)
class Difference:
    """One parameter under one plan: |workers - one process| / |one process| in norm, the largest of all ranks.

    verdict: "no gradient" where the true gradient is zero, so that only rounding moves the tensor (an attention's key
    bias, what no batch reads); its difference says nothing and is not judged.
    departs: whether the exchange is not exact, and is held to what it says of itself instead of to one process.
    is_trained: whether it is a parameter after training; not a buffer, nor a look at the model before.
    """

    parameter: str
    plan: str
    exchange: str
    difference: float
    verdict: Verdict
    departs: bool = False
    is_trained: bool = True


@dataclass(frozen=True)
class Acted:
    """How many times, over all ranks and groups, a mechanism of an exchange of that plan acted."""

    plan: str
    exchange: str
    mechanism: str
    times: int


@dataclass(frozen=True)
class Verification:
    """What came of it. note: why less is claimed than could be. lowered: options that are not as they were asked for,
    so that all that they put off happens in a few steps. admitted: where the
    schedule is not exact, as the plan says it. nodes: on which the workers were found."""

    workload: str
    workers: int
    steps: int
    tolerance: float
    differences: tuple[Difference, ...]
    note: str = ""
    acted: tuple[Acted, ...] = ()
    lowered: tuple[str, ...] = ()
    admitted: tuple[str, ...] = ()
    nodes: int = 1

    @property
    def is_equal(self) -> bool:
        """Whether something was judged, and all of that is equal."""
        return bool(self.judged) and all(one.verdict == "equal" for one in self.judged)

    @property
    def judged(self) -> tuple[Difference, ...]:
        """What says something. A run that took no step, or whose parameters got no gradient, says nothing."""
        judged = tuple(one for one in self.differences if one.verdict != "no gradient")
        has_trained = self.steps > 0 and any(one.is_trained for one in judged)
        return judged if has_trained or any(one.verdict == "differs" for one in judged) else ()

    @property
    def idle(self) -> tuple[Acted, ...]:
        """Mechanisms that never acted, of which equality says nothing."""
        return tuple(one for one in self.acted if not one.times)

    def page(self) -> Page:
        """What it prints: the verdict, a row for every plan, then every parameter that differs."""
        judged = self.judged
        verdict = "equal" if self.is_equal else "NOT equal"
        worst = max((one.difference for one in judged), default=0.0)
        departs = any(one.departs for one in judged)
        reference = "their references (NOT exact, see below)" if departs else "one process"
        if not judged:
            return (f"{self.workload}: {NOTHING_JUDGED} ({self._why_nothing()})",)
        words = (
            f"{self.workload}: {self.workers} workers on {number_of(self.nodes, 'node')} and {reference} are {verdict} "
            f"after {self.steps} steps in float64; largest difference {worst:.1e}, tolerance {self.tolerance:.0e} of a "
            "tensor's norm"
        )
        parts: list[str | Table] = [words, _by_plan(judged)]
        if len({one.plan for one in judged if one.is_trained}) > 1:
            parts.append("planned is the plan of this job; each row below it forces one exchange")
        if any(one.plan == BESIDE for one in judged):
            parts.append(f"{BESIDE}: their output, loss, gradients and buffers in one process, before training")
        parts += [f"{one}. The one process does the same" for one in self.admitted]
        for exchange in dict.fromkeys(one.exchange for one in judged if one.departs):
            parts.append(f"NOT exact, held to its own oracle instead of one process: {exchange}")
        parts += [f"lowered, so that all of it happens in a few steps: {one}" for one in self.lowered]
        if self.acted:
            rows = [(one.plan, one.exchange, one.mechanism, f"{one.times:,}") for one in self.acted]
            parts.append(Table(("plan", "exchange", "what it did", "times"), rows, (0, 1, 2)))
        for one in self.idle:
            parts.append(
                f"NOT exercised: {one.exchange}: {one.mechanism}: never on {self.workers} workers in {self.steps} "
                "steps; verify on more workers or steps, or a model that asks for it"
            )
        if differing := [one for one in judged if one.verdict == "differs"]:
            rows = [(one.parameter, one.plan, one.exchange, f"{one.difference:.1e}") for one in differing]
            parts.append(Table(("differs", "plan", "exchange", "difference"), rows, (0, 1, 2)))
        if apart := sorted({one.parameter for one in self.differences if one.verdict == "no gradient"}):
            parts.append(f"not judged, since the true gradient is zero: {', '.join(apart)}")
        return (*parts, *([f"note: {self.note}"] if self.note else []))

    def _why_nothing(self) -> str:
        if not self.steps:
            return "no step was taken"
        return "no parameter got a gradient" if self.differences else "the model has no parameter to train"

    def __str__(self) -> str:
        return page_text(self.page())


def _by_plan(judged: Sequence[Difference]) -> Table:
    """A row for every plan: where it is furthest from one process."""
    plans: dict[str, list[Difference]] = {}
    for one in judged:
        plans.setdefault(one.plan, []).append(one)
    rows = []
    for plan, those in plans.items():
        worst, count = max(those, key=lambda one: one.difference), len(those)
        equal = sum(one.verdict == "equal" for one in those)
        furthest = worst.parameter if worst.difference else ""
        rows.append((plan, f"{equal} of {count}", f"{worst.difference:.1e}", furthest))
    return Table(("plan", "tensors equal", "largest difference", "of"), rows, (0, 3))


RATE_DROP = 0.1
NOT_REPEATABLE = (
    f"compared to {TOLERANCE:.0e} instead of every bit: MKL_CBWR was not set, so equal numbers may round otherwise at "
    f"another address. Set MKL_CBWR=COMPATIBLE before Python starts, on every rank"
)


class Begun(NamedTuple):
    model: nn.Module
    optimizer: Optimizer


@dataclass(frozen=True)
class VerifiedCase:
    """What both sides train. Where steps are the schedule's, the rate falls after `half` of them.

    Args:
        label: the plan in words. every_bit: wanted where sums keep their order; None: if MKL's reproducible mode is set
            on every rank. joined: the workload with one batch of all workers together, for the one process.
        truths: of exact plans of this workload, by steps, as far as they are known.
    """

    workload: Workload
    plan: Plan
    steps: int
    seed: int
    label: str = ""
    every_bit: bool | None = None
    joined: Workload | None = None
    truths: dict[int, Truth] = field(default_factory=dict)

    @property
    def half(self) -> int:
        return self.steps // 2

    @property
    def options(self) -> ScheduleOptions:
        return options_of(self.plan)

    @property
    def micro_batches(self) -> int:
        """Of a step, those of all processes."""
        return self.options.total(self.plan.workers)

    def begun(self) -> Begun:
        """A new model, the same on every rank and in the one process."""
        torch.manual_seed(self.seed)
        model = self.workload.model()
        return Begun(model, self.workload.optimizer(model.parameters()))

    def rates(self, optimizer: Optimizer) -> MultiStepLR:
        return MultiStepLR(optimizer, [self.half], RATE_DROP)

    def feed(self, micro_batch: int) -> Iterator[Batch]:
        """What one of a step's micro-batches is, step by step: two that return, where an edge remembers samples."""
        feed = TrainBatches(self.workload, (micro_batch, self.micro_batches), self.seed)
        if any(code.cache_bytes for code in codes_of(self.options.edges).values()):
            return cycle([next(feed), next(feed)])
        return feed


@dataclass(frozen=True)
class TrainedCase:
    """
    Args:
        run: open. mine: what this rank holds, by name. acts: of all ranks.
        ways: by parameter, how it crossed, where not by the schedule. departing: of parameters that crossed otherwise
            than exactly.
        is_in_order: whether the truth makes every sum in the same order, so that every bit can be wanted.
    """

    run: Run
    steps: int
    mine: Mapping[str, Tensor]
    acts: Acts
    ways: Mapping[str, str]
    departing: frozenset[str]
    is_in_order: bool


@dataclass(frozen=True)
class Judged:
    """What came of one plan; see `Verification`."""

    differences: tuple[Difference, ...]
    steps: int = 0
    tolerance: float = TOLERANCE
    note: str = ""
    acted: tuple[Acted, ...] = ()
    admitted: tuple[str, ...] = ()


def judged(case: VerifiedCase, trained: TrainedCase, truth: Truth) -> Judged:
    """Collective: ends the run. truth: the same on every rank."""
    run, plan, true = trained.run, case.plan, truth.of(trained.run.rank)
    transport = run._transport
    largest = transport.agree_largest([apart(mine, true[name]) for name, mine in trained.mine.items()])
    is_exact = case.every_bit
    if is_exact is None:
        is_exact = not any(transport.agree_largest([float(not is_repeatable())]))
    tolerance = 0.0 if is_exact and trained.is_in_order else TOLERANCE
    run.close(gather=False)
    differences = []
    for name, difference in zip(trained.mine, largest, strict=True):
        verdict: Verdict = "equal" if difference <= tolerance else "differs"
        if name in truth.quiet and (tolerance or not difference):
            verdict = "no gradient"
        way, is_trained = trained.ways.get(name, plan.schedule.name), name in plan.parameters
        is_other = name in trained.departing
        differences.append(Difference(name, case.label, way, difference, verdict, is_other, is_trained))
    note = NOT_REPEATABLE if trained.is_in_order and not is_exact else ""
    acted = tuple(Acted(case.label, *key, times) for key, times in trained.acts.items())
    admitted = tuple(one for one in plan.notes if one.startswith("NOT exact: "))
    return Judged(tuple(differences), trained.steps, tolerance, note, acted, admitted)


def apart(found: Tensor, true: Tensor) -> float:
    """Zero only if every bit is equal; else the difference over the true norm, or infinity where that says nothing."""
    if torch.equal(found, true):
        return 0.0
    difference = float((found - true).double().norm()) / (float(true.double().norm()) or 1.0)
    return difference if difference > 0.0 else float("inf")
