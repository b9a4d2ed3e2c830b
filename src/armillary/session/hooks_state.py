"""The state of a plan behind the user's own loop: its groups on this rank, and what is checked at each optimizer step.

`units_of` makes the groups from a plain model and optimizer, at attach and whenever a run moves to another plan;
`prefetch_of` is the one place that knows which kinds of prefetch there are. An optimizer that is about to step is
refused parameters that the plan does not know, and options under which a window is no longer exact. `zero_grad` is
listened to, because gradients of row-sharded tables accumulate in look-ups that no optimizer sees.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_dense, row_exchanges
from armillary.plans.plan import Plan
from armillary.prefetch.batches import WATCHED_DRAWS
from armillary.prefetch.delayed_gradients import DelayedGradients, can_split
from armillary.prefetch.prefetcher import DEPTH, Prefetcher
from armillary.runtime.dense_unit import DenseUnit, dense_unit
from armillary.runtime.executor import Executor, RowUnit
from armillary.session.data_check import FirstBatches
from armillary.session.health import FiniteCheck
from armillary.session.job import NamedTensor, TrainJob
from armillary.tables.build import make_table, put_handle
from armillary.tables.handle import TableHandle
from armillary.tables.lookups import NoDelay, NoPrefetch, Prefetch
from armillary.tables.optimizer_state import Held, by_name, plain, table_state
from armillary.tables.optimizer_trial import leaves_untouched_rows, takes_listed_rows
from armillary.tables.optimizers import holder, members, options_of
from armillary.tables.table import RowTable
from armillary.transport.transport import Transport

__all__ = [
    "Units",
    "WindowOptions",
    "prefetch_of",
    "refuse_strangers",
    "rest_of",
    "steps_to_learn",
    "tell_of_zero_grad",
    "tensors_of",
    "units_of",
]


def prefetch_of(plan: Plan, tables: Sequence[RowTable], optimizer: Optimizer, transport: Transport) -> Prefetch:
    """For these tables of the plan, in launch order."""
    kinds = {group.parameters[0]: group.prefetch for group in plan.groups if group.prefetch != "none"}
    if not kinds:
        return NoPrefetch()
    pulled = [table for table in tables if table.is_pulled]
    if "gradients" not in kinds.values():
        return Prefetcher(pulled, kinds, transport, NoDelay())
    is_one = len(members(optimizer)) == 1
    whole = {t.name for t in tables if t.has_window and not (is_one and can_split(optimizer, t))}
    return Prefetcher(pulled, kinds, transport, DelayedGradients(kinds, transport, whole))


def steps_to_learn(plan: Plan) -> int:
    """Steps of a loop of which nothing is predicted yet."""
    return WATCHED_DRAWS + DEPTH if plan.looks_ahead else 0


def tell_of_zero_grad(optimizer: Optimizer, told: Callable[[Optimizer], None]) -> Callable[[], None]:
    """Calls told(optimizer), a bound method, after each `zero_grad`, until what is returned takes that back. Whom it
    tells is known weakly: the optimizer is the user's."""
    known, listener = weakref.ref(optimizer), weakref.WeakMethod(told)
    before = {name: value for name, value in vars(optimizer).items() if name == "zero_grad"}

    def zero_grad(set_to_none: bool = True) -> None:
        one, heard = known(), listener()
        assert one is not None
        plain = before.get("zero_grad") or type(one).zero_grad.__get__(one)
        plain(set_to_none)
        if heard is not None:
            heard(one)

    def restore() -> None:
        one = known()
        if one is not None and vars(one).get("zero_grad") is zero_grad:  # else somebody wrapped it since
            del one.zero_grad
            vars(one).update(before)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return restore


NO_ROWS: Mapping[str, Tensor] = {}


@dataclass(frozen=True, eq=False)
class Units:
    """
    Args of note:
        held: optimizer state of the tables of which the optimizer sees a window only, by name.
    """

    executor: Executor
    held: dict[str, Held] = field(default_factory=dict)


def units_of(
    plan: Plan, job: TrainJob, transport: Transport, first: FirstBatches, shards: Mapping[str, Tensor] = NO_ROWS
) -> Units:
    """Model and optimizer hold tables from here on. No value is computed.

    Args:
        first: compares what ranks were given, when gradients are final.
        shards: this rank's rows of the tables that have no values yet (meta device), by name.
    """
    trainable = {name: p for name, p in job.model.named_parameters() if p.requires_grad}
    units: list[DenseUnit | RowUnit] = []
    rewritten = _rewritten(job)
    held: dict[str, Held] = {}
    for group in plan.groups:
        if group.own_exchange.name in row_exchanges():
            name = group.parameters[0]
            table, held[name] = make_table(group, trainable[name], job.optimizer, transport, shards.get(name))
            put_handle(trainable[name], table)
            units.append(RowUnit(group.name, table))
        else:
            members = {name: trainable[name] for name in group.parameters}
            exchange = build_dense(group.own_exchange.name, **group.own_exchange.options)
            listable = [name for name in group.parameters if exchange.takes_rows and _lists(job, trainable[name])]
            unit = dense_unit(group.name, members, exchange, transport.place, listable)
            unit.rewritten = rewritten.intersection(group.parameters)
            units.append(unit)
    scaler = job.scaler
    scale = partial(float, 1.0) if scaler is None or not scaler.is_enabled() else scaler.get_scale
    prefetch = prefetch_of(plan, [unit.table for unit in units if isinstance(unit, RowUnit)], job.optimizer, transport)
    executor = Executor(units, transport, plan.mean, first.compare, scale, prefetch)
    if job.check_finite:
        finite = FiniteCheck(transport)
        executor.on_local_grads, executor.on_settled = finite.look, finite.and_then(first.compare)
    return Units(executor, held)


def _rewritten(job: TrainJob) -> frozenset[str]:
    """Parameters into which forwards write, as modules say (max_norm), or as a profile saw."""
    profiled = () if job.profile is None else job.profile.parameters
    normed = {one.weight for one in job.model.modules() if getattr(one, "max_norm", None) and hasattr(one, "weight")}
    names = {name for name, parameter in job.model.named_parameters() if parameter in normed}
    return frozenset(names | {fact.name for fact in profiled if fact.is_rewritten})


def _lists(job: TrainJob, parameter: nn.Parameter) -> bool:
    """Whether its optimizer takes its gradient as rows."""
    optimizer = holder(job.optimizer, parameter)
    options = None if optimizer is None else options_of(optimizer, parameter)
    return optimizer is not None and options is not None and takes_listed_rows(optimizer, options, parameter)


def refuse_strangers(rank: int, model: nn.Module, optimizer: Optimizer, known: Container[Tensor]) -> None:
    """Parameters that learn but are not in the plan would drift apart on the ranks.

    Raises:
        ValueError: there is one.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter not in known:
                name = next((name for name, p in model.named_parameters() if p is parameter), None)
                raise ValueError(
                    f"rank {rank}: {name or 'a parameter outside the model'} {tuple(parameter.shape)} has a gradient "
                    "but is not in the plan (unfrozen after attach?); call run.close(), which makes the model plain, "
                    "plan again and attach anew"
                )


@dataclass(eq=False)
class WindowOptions:
    """A window is exact as long as the optimizer leaves rows without gradient alone; options may change that.

    Args:
        lazy: names of tables where that may be.
    """

    rank: int
    optimizer: Optimizer
    lazy: Container[str]
    _seen: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the optimizer for each window

    def refuse_new(self, windows: Iterable[RowTable]) -> None:
        """
        Raises:
            ValueError: rows would move that get no gradient.
        """
        for table in windows:
            group = options_of(self.optimizer, table.parameter)
            if group is None or table.name in self.lazy:
                continue
            options = {name: value for name, value in group.items() if name not in ("params", "lr")}
            if self._seen.setdefault(table.name, options) != options:
                if not leaves_untouched_rows(holder(self.optimizer, table.parameter), group, table.parameter):
                    raise ValueError(
                        f"rank {self.rank}: {table.name}: the optimizer's options are now {options}, with which rows "
                        "move that get no gradient; set them before attach, or plan the table as lazy"
                    )
                self._seen[table.name] = options


def rest_of(
    model: nn.Module,
    optimizer: Optimizer,
    names: list[str],
    tables: Mapping[str, RowTable],
    held: Mapping[str, Held],
) -> dict[str, Any]:
    """ "model": a state_dict without tables; "optimizer": by name, without rows."""
    rest = by_name(optimizer.state_dict(), names)
    for name, table in tables.items():
        entries = table_state(table, optimizer, held.get(name, {})).rest
        rest["state"].pop(name, None)
        if entries:
            rest["state"][name] = entries
    rest["param_groups"] = [{key: plain(value) for key, value in group.items()} for group in rest["param_groups"]]
    whole = {key: value for key, value in model.state_dict().items() if not isinstance(value, TableHandle)}
    return {"model": whole, "optimizer": rest}


def tensors_of(unit: DenseUnit | RowUnit, optimizer: Optimizer, held: Mapping[str, Held]) -> Iterator[NamedTensor]:
    """What a group keeps on this rank: weights, gradients, optimizer state, and what its exchange keeps."""
    tensors: list[Any]
    if isinstance(unit, DenseUnit):
        name, tensors = unit.bucket.layout.names[0], [unit.bucket.flat, *unit.state.values()]
    else:
        name, table = unit.table.name, unit.table
        tensors = [table.shard, table.gradient, *held[name].values()]
    for owner in unit.parameters:
        tensors += [owner, *optimizer.state.get(owner, {}).values()]
    yield from (NamedTensor(name, one) for one in tensors)
