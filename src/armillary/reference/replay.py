"""Training without a common clock, replayed in one process from what the owners logged.

The model is the user's own, whole and plain. Every owner's part of it is what its log says at every moment: a pull
copies the part, a push steps it. A worker's step runs `loss(model, batch)` on the copies that it pulled. An event may
happen when what it needs was computed: a pull, its worker's step before; a push, its own. That need not be stepped with
everywhere, as one owner may be far ahead of another.

Each tensor is stepped by an optimizer of its own, of a table the rows that the batch read.
"""

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from armillary.plans.update_log import Event, Kind
from armillary.schedules.random_streams import seeded

__all__ = ["Replay", "replayed"]

Options = Sequence[Mapping[str, Any]]  # of every group of the optimizer, without its parameters


@dataclass(frozen=True)
class Replay:
    """What a log does not hold.

    Args:
        model, optimizer: as training began; left with what it ended with. loss: (model, batch) -> scalar.
        owned: names of whole parameters, by owner. tables: names of those whose row r owner r % owners has.
        batch_of: of a pull, what its worker trained on. options_of: (worker, step) -> with what it was stepped.
        seed: of the random numbers of each step.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[nn.Module, Any], Tensor]
    owned: Sequence[Sequence[str]]
    tables: Sequence[str]
    batch_of: Callable[[Event], Any]
    options_of: Callable[[int, int], Options]
    seed: int = 0


@dataclass
class _Worker:
    """ready: steps computed. copies: of each owner's part, as pulled. gradients, read: by step."""

    ready: int = 0
    pulls: int = 0
    copies: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)
    read: dict[int, Mapping[str, Tensor]] = field(default_factory=dict)  # distinct rows of each table


def replayed(given: Replay, logs: Sequence[Iterable[Event]]) -> None:
    """
    Args:
        logs: by owner.

    Raises:
        ValueError: no order of events agrees with all logs.
    """
    _Replaying(given, [list(log) for log in logs]).run()


class _Replaying:
    def __init__(self, given: Replay, logs: Sequence[Sequence[Event]]) -> None:
        self.given, self.logs, self.owners = given, logs, len(logs)
        self.parameters = dict(given.model.named_parameters())
        trained = [*given.tables, *(name for names in given.owned for name in names)]
        self.now = {name: self.parameters[name].detach().clone() for name in trained}
        self.state = {name: dict(given.optimizer.state.get(self.parameters[name], {})) for name in trained}
        # what counts steps of a table, each owner has for itself
        self.counts = [{name: copy.deepcopy(self._beside_rows(name)) for name in given.tables} for _ in logs]
        self.begun = [{name: {*self.state[name]} for name in trained} for _ in logs]  # entries that an owner has
        self.workers: defaultdict[int, _Worker] = defaultdict(_Worker)
        pulls = (event for log in logs for event in log if event.kind == Kind.PULL)
        self.wanted = Counter((event.worker, event.step) for event in pulls)

    def _beside_rows(self, name: str) -> dict[str, Any]:
        shape = self.now[name].shape
        return {key: one for key, one in self.state[name].items() if getattr(one, "shape", None) != shape}

    def run(self) -> None:
        at = [0] * self.owners
        while any(place < len(log) for place, log in zip(at, self.logs, strict=True)):
            before = list(at)
            for owner, log in enumerate(self.logs):
                while at[owner] < len(log) and self._happens(owner, log[at[owner]]):
                    at[owner] += 1
            if at == before:
                stuck = [log[place] for place, log in zip(at, self.logs, strict=True) if place < len(log)]
                raise ValueError(f"replay: the logs contradict one another; none of these can be next: {stuck}")
        with torch.no_grad():
            for name, values in self.now.items():
                self.parameters[name].copy_(values)

    def _happens(self, owner: int, event: Event) -> bool:
        """Whether the event could, and so did, happen now."""
        worker = self.workers[event.worker]
        if event.kind == Kind.PULL:
            if worker.ready != event.step:
                return False
            self._copy(owner, worker)
            worker.pulls += 1
            if worker.pulls == self.wanted[event.worker, event.step]:
                self._compute(worker, event)
        elif event.kind == Kind.PUSH:
            if event.step not in worker.gradients:
                return False
            self._step(owner, event, worker)
        return True

    def _copy(self, owner: int, worker: _Worker) -> None:
        for name in self.given.owned[owner]:
            worker.copies[name] = self.now[name].clone()
        for name in self.given.tables:
            whole = worker.copies.setdefault(name, torch.zeros_like(self.now[name]))
            whole[owner :: self.owners] = self.now[name][owner :: self.owners]

    def _compute(self, worker: _Worker, event: Event) -> None:
        model, tables = self.given.model, {name: self.parameters[name] for name in self.given.tables}
        with torch.no_grad():
            for name, values in worker.copies.items():
                self.parameters[name].copy_(values)
        for parameter in self.parameters.values():
            parameter.grad = None
        batch = self.given.batch_of(event)
        with _Reads(tables) as reads, seeded(self.given.seed, (event.step, event.worker, 0), torch.device("cpu")):
            self.given.loss(model, batch).backward()
        found = {name: self.parameters[name].grad for name in self.now}
        worker.gradients[event.step] = {name: one.to_dense() for name, one in found.items() if one is not None}
        worker.read[event.step] = reads.rows()
        worker.ready, worker.pulls = event.step + 1, 0

    def _step(self, owner: int, event: Event, worker: _Worker) -> None:
        gradients, options = worker.gradients[event.step], self.given.options_of(event.worker, event.step)
        for name in self.given.owned[owner]:
            if name in gradients:
                kept = _Kept(self.state[name], self.begun[owner][name])
                self._stepped(name, slice(None), gradients[name], options, kept)
        for name in self.given.tables:
            rows = worker.read[event.step].get(name, torch.empty(0, dtype=torch.int64))
            mine = rows[rows % self.owners == owner]
            if name in gradients and len(mine):
                held = _Kept(self.counts[owner][name], self.begun[owner][name])
                self._stepped(name, mine, gradients[name], options, held)

    def _stepped(self, name: str, rows: Any, gradient: Tensor, options: Options, held: "_Kept") -> None:
        """One step of some rows by an optimizer of their own."""
        values, kept, whole = self.now[name], self.state[name], self.now[name].shape
        beside, begun = held
        by_row = {key: kept[key] for key in begun & kept.keys() if getattr(kept[key], "shape", None) == whole}
        parameter = nn.Parameter(values[rows].clone())
        parameter.grad = gradient[rows].clone()
        others = {key: one for key, one in beside.items() if getattr(one, "shape", None) != whole}
        one = _alone(self.given.optimizer, self.parameters[name], parameter, options)
        one.state[parameter] = {**others, **{key: there[rows].clone() for key, there in by_row.items()}}
        if not one.state[parameter]:
            del one.state[parameter]
        one.step()
        values[rows] = parameter.detach()
        for key, value in one.state.get(parameter, {}).items():
            begun.add(key)
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                kept.setdefault(key, torch.zeros_like(values))[rows] = value
            else:
                beside[key] = value


class _Kept(NamedTuple):
    """Of an owner. beside: state that has no value for each row. begun: entries that its optimizer has made."""

    beside: dict[str, Any]
    begun: set[str]


def _alone(optimizer: Optimizer, whose: Tensor, parameter: nn.Parameter, options: Options) -> Optimizer:
    """An optimizer as the user's, over this parameter in the place of another."""
    one = copy.copy(optimizer)
    for name in [name for name in vars(one) if name.endswith("_hooks")]:
        vars(one)[name] = OrderedDict()
    vars(one).pop("step", None)
    places = [at for at, group in enumerate(optimizer.param_groups) if any(p is whose for p in group["params"])]
    one.param_groups = [{**dict(options[place]), "params": [parameter]} for place in places]
    one.state = defaultdict(dict)
    return one


class _Reads(TorchFunctionMode):
    """Inside, which rows of these parameters are looked up is noticed."""

    def __init__(self, tables: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(table): name for name, table in tables.items()}
        self._found: defaultdict[str, list[Tensor]] = defaultdict(list)

    def rows(self) -> dict[str, Tensor]:
        """Distinct, ascending, by table."""
        return {name: torch.cat(found).unique() for name, found in self._found.items()}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (functional.embedding, functional.embedding_bag):
            given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            self._notice(given["weight"], given["input"])
        elif func in (Tensor.__getitem__, Tensor.index_select, torch.index_select):
            self._notice(args[0], args[-1] if func is Tensor.__getitem__ else kwargs.get("index", args[-1]))
        return func(*args, **kwargs)

    def _notice(self, table: Any, ids: Any) -> None:
        if id(table) in self._names:
            ids = torch.as_tensor(ids[0] if isinstance(ids, tuple) else ids).reshape(-1)
            rows = len(table)
            self._found[self._names[id(table)]].append(torch.where(ids < 0, ids + rows, ids).long())
