"""Asks every method what it would bring in a situation; and which would do best where the plan by price does not fit.

A `Situation` is what every method is told: the profiled model, the machines, the plan by price, and prices of others.
One forward and its loss show what a profile does not: recurrences, a causal mask, classes; and how long it takes. A
module counts as a cell in a loop of the model's own where it is called again on what it gave before. Where a loop is
watched, what went into its last forward is kept (`WatchedBatch`): enough to try methods on.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from armillary.models.preserved_state import untouched
from armillary.planning.clock import Simulation
from armillary.planning.memory import NothingFits, needed_bytes
from armillary.planning.planner import make_plan
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.plans.advice import Adviser, ForwardFacts, PricedPlan, Recurrent, Situation, advisers, not_for
from armillary.plans.group import Forecast
from armillary.plans.plan import SIMULTANEOUS, Plan
from armillary.plans.profile import Profile
from armillary.plans.registry import Choice
from armillary.plans.topology import Topology
from armillary.profiler.profiler import profile
from armillary.profiler.unfit_model import refusing_collectives
from armillary.schedules.registry import SCHEDULES, options_of
from armillary.session.advice_page import Row
from armillary.session.data_check import entrances
from armillary.session.model_to_plan import ModelToPlan, assumptions_of
from armillary.stages.stages import refuse_uncut

__all__ = [
    "NO_LIMIT",
    "Given",
    "Told",
    "Typed",
    "WatchedBatch",
    "forward_facts",
    "naming_remedies",
    "of_outputs",
    "played",
    "rows_of",
    "silent",
    "situation_of",
]

Loss = Callable[[nn.Module, Any], Tensor]
ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


def forward_facts(model: nn.Module, batch: Any, loss: Loss, is_stream: bool) -> ForwardFacts:
    """The model stays as it was."""
    with untouched(model), torch.enable_grad():
        loss(model, batch)  # warms up
        began = time.perf_counter()
        loss(model, batch)
        seconds = time.perf_counter() - began
        with _calls(model) as calls, _Functions() as functions:
            loss(model, batch)
    return ForwardFacts(seconds, tuple(calls.found()), functions.is_causal, functions.classes, is_stream)


class _Calls:
    """How often each module was called, and how often on what it gave before."""

    def __init__(self) -> None:
        self.steps: dict[str, Recurrent] = {}
        self.again: dict[str, int] = {}
        self.gave: dict[str, list[Tensor]] = {}

    def entered(self, path: str, module: nn.Module, args: Any) -> None:
        given = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
        before = self.gave.get(path, ())
        if any(one is other for one in given for other in before):
            self.again[path] = self.again.get(path, 1) + 1
        if isinstance(module, nn.RNNBase) and args:
            self._sequence(path, module, args[0])

    def left(self, path: str, output: Any) -> None:
        self.gave[path] = [one for one in tree_leaves(output) if isinstance(one, Tensor)]

    def _sequence(self, path: str, module: nn.RNNBase, given: Any) -> None:
        if isinstance(given, PackedSequence):
            steps = len(given.batch_sizes)
        else:
            steps = given.shape[1 if module.batch_first and given.dim() == 3 else 0]
        if path not in self.steps or self.steps[path].steps < steps:
            self.steps[path] = Recurrent(path, module.mode, steps, False)

    def found(self) -> Iterator[Recurrent]:
        yield from self.steps.values()
        inner = {path for path in self.again if any(path.startswith(f"{other}.") for other in self.again)}
        inner |= {path for path in self.again if path in self.steps}
        yield from (Recurrent(path, "", many, True) for path, many in self.again.items() if path not in inner)


@contextmanager
def _calls(model: nn.Module) -> Iterator[_Calls]:
    seen, handles = _Calls(), []
    for path, module in model.named_modules():
        if path:
            before = lambda module, args, path=path: seen.entered(path, module, args)  # noqa: E731
            after = lambda module, args, output, path=path: seen.left(path, output)  # noqa: E731
            handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.is_causal, self.classes = False, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ATTENTION and kwargs.get("is_causal"):
            self.is_causal = True
        if func is F.cross_entropy:
            self._labels(args, kwargs)
        return func(*args, **kwargs)

    def _labels(self, args: Any, kwargs: Any) -> None:
        given = dict(zip(("input", "target"), args, strict=False)) | kwargs
        logits, labels = given["input"], given["target"]
        if logits.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point():
            self.classes = logits.shape[1]


Given = tuple[Any, Any]  # arguments and keywords


class WatchedBatch:
    """Attributes: given, to the last forward under autograd; None: there was none.

    A model that is a mere container has none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.given: Given | None = None
        alone = [one for one in entrances(model) if one is model]
        hooks = [one.register_forward_pre_hook(self._entered, with_kwargs=True) for one in alone]
        self._undo: list[Callable[[], None]] = [hook.remove for hook in hooks]

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.given = args, kwargs

    def __deepcopy__(self, memo: dict[int, Any]) -> "WatchedBatch":
        return self

    def end(self) -> None:
        """Nothing of it is left."""
        for undo in self._undo:
            undo()
        self._undo, self.given = [], None


def of_outputs(model: nn.Module, batch: Given) -> Tensor:
    """In place of the loss, which nobody gave: it keeps the same activations, and takes about as long."""
    args, kwargs = batch
    outputs = [one for one in tree_leaves(model(*args, **kwargs)) if isinstance(one, Tensor) and one.requires_grad]
    return torch.stack([one.mean() for one in outputs]).sum()


NO_LIMIT = 1 << 62  # bytes
PROFILED_WORKERS = 8


@dataclass(frozen=True)
class Typed:
    """A workload as it was typed, and lines that make model, optimizer, batches and loss of it; empty in a script."""

    line: str = ""
    preamble: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Prices:
    """What any plan costs here; one that does not fit is priced as if there were room."""

    case: Case
    subject: ModelToPlan
    batches: list[Any]

    def __call__(self, schedule: Choice = SIMULTANEOUS, **asked: Any) -> PricedPlan:
        request = PlanRequest(schedule=schedule, **asked)
        try:
            made = make_plan(self.case, request)
        except NothingFits:
            roomy = replace(self.case, topology=replace(self.case.topology, memory_bytes=NO_LIMIT))
            made = make_plan(roomy, request)
        if (
            SCHEDULES[schedule.name].objectives.prepare is None
        ):  # else it changes the model before it cuts it, and says itself
            refuse_uncut(made, self.subject.model, self.subject.loss, self.batches[0])
        if len(made.stages) > 1 and len(set(map(_shapes, self.batches))) > 1:
            raise ValueError("batches differ in shape, and stages want micro-batches of one shape: pad them")
        return PricedPlan(made, self.forecast(made))

    def forecast(self, made: Plan) -> Forecast:
        """Of a step in which every rank takes one batch. A schedule's own step may have more of them, or fewer."""
        total, workers = made.forecast, made.workers
        share = workers / options_of(made).total(workers)
        held = needed_bytes(made, self.case)
        seconds = made.step_seconds or total.seconds
        return Forecast(share * total.sent_bytes, held - total.peak_bytes, share * seconds, total.peak_bytes)


def situation_of(
    subject: ModelToPlan,
    topology: Topology,
    found: Profile | None = None,
    *,
    typed: Typed = Typed(),
    is_stream: bool = False,
    measures: bool = False,
) -> Situation:
    """
    Args:
        found: the model's profile; None: it is made now.

    Raises:
        ValueError: there is no batch, or the model cannot be profiled.
    """
    batches = _drawn(subject, min(topology.workers, PROFILED_WORKERS))
    seen = min(len(batches), topology.workers, PROFILED_WORKERS)
    if found is None:
        model, loss = subject.model, subject.loss
        found = profile(model, batches, loss, workers=seen, stages=subject.stages)
    case = Case(found, topology, assumptions_of(subject.optimizer, subject.model))
    prices = _Prices(case, subject, batches)
    facts = forward_facts(subject.model, batches[0], subject.loss, is_stream)
    trained = [fact for fact in found.parameters if fact.requires_grad]
    bare = Situation(
        subject.model, subject.optimizer, subject.loss, batches, found, topology, facts, prices(), prices,
        optimizer_slots=case.slots_of(trained), typed=typed.line, preamble=typed.preamble, measures=measures,
    )  # fmt: skip
    return replace(bare, pipeline=_pipeline(bare))


def played(situation: Situation) -> Simulation:
    """A step of the plan by price against a clock."""
    return simulate(situation.chosen.plan, situation.price.case)  # type: ignore[attr-defined]


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple(tuple(one.shape) for one in tree_leaves(batch) if isinstance(one, Tensor))


def _drawn(subject: ModelToPlan, workers: int) -> list[Any]:
    batches = list(subject.draw(workers))
    if not batches:
        raise ValueError("advise: batches gave none; give one at least")
    return batches


def _pipeline(situation: Situation) -> Choice | None:
    """The quickest exact schedule that cuts the model over all ranks."""
    found = [(made.forecast.seconds, schedule) for schedule, made in _cut(situation) if not made.plan.departures]
    return min(found, key=lambda one: one[0], default=(0.0, None))[1]


def _cut(situation: Situation) -> Iterator[tuple[Choice, PricedPlan]]:
    for name, method in SCHEDULES.all().items():
        if not method.is_cut or method.replicates_table or "micro_batches" not in method.options.knows:
            continue
        for count in situation.stage_counts:
            schedule = Choice(name, {"micro_batches": count, "stages": count})
            try:
                yield schedule, situation.price(schedule=schedule)
            except ValueError:
                continue
            break


Told = Callable[[str], object]


def silent(text: str) -> None:
    return None


def rows_of(situation: Situation, told: Told = silent) -> list[Row]:
    """Of every method, by name.

    Args:
        told: hears who is asked.
    """
    rows = []
    for name, adviser in advisers().items():
        told(f"asking {name}")
        rows.append(_row(name, adviser, situation))
    return rows


def _row(name: str, adviser: Adviser, situation: Situation) -> Row:
    try:
        advice = adviser.ask(situation)
    except Exception as error:  # whatever one method raises, the others are asked
        advice = not_for(f"its advice failed: {type(error).__name__}: {error}")
    return Row(name, adviser.says, adviser.page, adviser.is_inference, advice, situation.topology.memory_bytes)


@contextmanager
def naming_remedies(subject: ModelToPlan, topology: Topology, found: Profile | None = None) -> Iterator[None]:
    """Where nothing fits, the error names the two methods that would do best.

    Args:
        found: the model's profile; None: it is made where it is wanted.
    """
    try:
        yield
    except NothingFits as error:
        try:
            with refusing_collectives():  # rank 0 asks alone
                would = _remedies(situation_of(subject, topology, found))
        except Exception:  # what went wrong first is what the caller must hear
            would = []
        if not would:
            raise
        others = "\n".join(f"  {one}" for one in would)
        raise NothingFits(f"{error}\nOf all methods (armillary advise), these would do best:\n{others}") from None


def _remedies(situation: Situation, count: int = 2) -> list[str]:
    """What would fit where the plan by price does not: the quickest of the exact methods, then of the others."""
    found = [row for row in rows_of(situation) if not row.is_inference]
    fitting = [row for row in found if row.held_bytes is not None and row.fits]
    fitting.sort(key=lambda row: (bool(row.advice.departures), row.figure("seconds") or 0.0))
    return [row.in_words() for row in fitting[:count]]
