"""Watches every tensor operation of a step and says how each parameter is read: by row, whole, or never.

Only operations that touch a parameter's storage count, not its module or `sparse=True`. So bare parameters, sampled
softmax and tied weights are named rightly. Values never make a parameter sparse. Rows are counted from ids, and repeats
inside a worker's batch are merged first, as the exchanges do.

Source: Parallax (Kim et al., EuroSys 2019) tells sparse from dense by the type of the gradient in a static graph. Eager
PyTorch has neither, hence a dispatch mode. Departure: a tied table that is also read whole counts as "both", where the
type of the gradient would call it sparse.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from armillary.exchanges.ownership import Ownership
from armillary.plans.profile import RowFacts

__all__ = ["NO_LOOKUPS", "Lookups", "Reading", "WatchReads", "merged", "row_facts"]

HOTTEST = 10


@dataclass(frozen=True)
class Lookups:
    """What one worker's batch asked of one table.

    Args of note:
        calls: gather calls. rows: (distinct,) int64, ascending; counts: (distinct,) int64, how often each.
        asked: distinct rows of each call, added up.
        paddings: the padding rows the calls named, None for a call that named none.
    """

    calls: int
    rows: Tensor
    counts: Tensor
    asked: int
    paddings: frozenset[int | None] = frozenset()

    @property
    def ids(self) -> int:
        return int(self.counts.sum())


NO_LOOKUPS = Lookups(0, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 0)


def merged(parts: Sequence[Lookups]) -> Lookups:
    """Several sets of lookups as one: calls and counts add up, rows are united."""
    if not parts:
        return NO_LOOKUPS
    rows, place = torch.cat([part.rows for part in parts]).unique(return_inverse=True)
    counts = torch.zeros_like(rows).index_add_(0, place, torch.cat([part.counts for part in parts]))
    paddings = frozenset[int | None]().union(*(part.paddings for part in parts))
    return Lookups(sum(part.calls for part in parts), rows, counts, sum(part.asked for part in parts), paddings)


def row_facts(rows: int, row_bytes: int, batches: Sequence[Lookups], workers: int, workers_per_node: int) -> RowFacts:
    """The facts of one table from one `Lookups` per batch; worker w's batches are batches[w::workers].

    A last step that lacks batches is left out of everything except `hottest`'s total and `padding_idx`.
    """
    used = batches[: len(batches) // workers * workers]
    nodes = [merged(used[first : first + workers_per_node]) for first in range(0, len(used), workers_per_node)]
    steps = [merged(used[first : first + workers]) for first in range(0, len(used), workers)]
    everything, owners = merged(batches), tuple(range(workers))
    paddings = set(everything.paddings)
    return RowFacts(
        rows=rows,
        row_bytes=row_bytes,
        lookups=sum(batch.calls for batch in used) / len(used),
        ids=sum(batch.ids for batch in used) / len(used),
        alpha_worker=_alpha(used, rows),
        alpha_node=_alpha(nodes, rows),
        alpha_union=_alpha(steps, rows),
        hottest=_hottest(everything),
        load_modulo=_load(used, Ownership(rows, owners, workers, "modulo")),
        load_hashed=_load(used, Ownership(rows, owners, workers, "hashed")),
        load_blocks=_shares([batch.rows // -(-rows // workers) for batch in used], workers),
        padding_idx=paddings.pop() if len(paddings) == 1 else None,
        repeated=_repeated(used, steps, workers),
        asked_rows=sum(batch.asked for batch in used) / len(used),
    )


def _alpha(merges: Sequence[Lookups], rows: int) -> float:
    return sum(len(part.rows) for part in merges) / (len(merges) * rows)


def _repeated(batches: Sequence[Lookups], steps: Sequence[Lookups], workers: int) -> float | None:
    """Share of the rows of a batch that are among those of the step before; None of a single step, or of no rows."""
    later = list(enumerate(batches))[workers:]
    shared = sum(int(torch.isin(batch.rows, steps[place // workers - 1].rows).sum()) for place, batch in later)
    total = sum(len(batch.rows) for _, batch in later)
    return shared / total if total else None


def _hottest(lookups: Lookups) -> tuple[tuple[int, float], ...]:
    """The rows asked for most, ties in row order, each with its share of all ids."""
    order = torch.sort(lookups.counts, descending=True, stable=True).indices[:HOTTEST]
    total = max(lookups.ids, 1)
    return tuple((int(lookups.rows[place]), int(lookups.counts[place]) / total) for place in order)


def _load(batches: Sequence[Lookups], ownership: Ownership) -> tuple[float, ...]:
    """Each owner's share when rows are dealt out as the exchange over owned rows does."""
    return _shares([ownership.keys(batch.rows) // ownership.capacity for batch in batches], ownership.workers)


def _shares(owners: Sequence[Tensor], workers: int) -> tuple[float, ...]:
    """Each owner's share of all rows sent; equal shares if none is."""
    counts = torch.cat(list(owners)).bincount(minlength=workers).tolist()
    total = sum(counts)
    return tuple(count / total for count in counts) if total else (1 / workers,) * workers


aten = torch.ops.aten

# The operations that gather rows: operator -> (argument that is the table, argument that holds the ids).
GATHERS = {
    aten.embedding.default: ("weight", "indices"),
    aten._embedding_bag.default: ("weight", "indices"),
    aten._embedding_bag_forward_only.default: ("weight", "indices"),
    aten.index_select.default: ("self", "index"),
    aten.index.Tensor: ("self", "indices"),
}

# These touch only looked-up rows on behalf of one of the above; they are no lookups of their own.
COMPANIONS = {
    aten.embedding_renorm_.default: "self",
    aten._embedding_bag_per_sample_weights_backward.default: "weight",
}

# These take shape, dtype and device from a tensor and read none of its values: `weight.new_zeros(...)` is how
# many recurrent models make their first state, from whatever parameter comes first.
UNREAD = {
    *(aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full, aten.new_empty_strided),
    *(aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.rand_like, aten.randn_like),
}

MAX_NORM = "max_norm rewrites rows during the look-up, on whichever worker reads them"
SCALED = "scale_grad_by_freq divides by how often an id occurs in the whole batch, which no owner sees"
VIEWED = "its rows are read through a view, which an owned table does not offer; index the table itself"
RECOMPUTED = "its rows are read again inside backward (activation checkpointing); keep the look-up outside"
LATE = (
    "its rows get gradients in two backwards of one look-up, and theirs leave with the first; look rows up again for "
    "each, or add the losses and run one backward"
)
MADE_FROM = "{} takes shape and dtype from it, which an owned table does not offer; take them from another tensor"
SHARED = "its memory is shared with {}"


@dataclass
class Reading:
    """What has been seen of one parameter so far.

    Args of note:
        gathers: operations that read rows; dense: operations that read or wrote it whole.
        pending: lookups since the last `take`.
    """

    parameter: nn.Parameter
    gathers: set[str] = field(default_factory=set)
    dense: set[str] = field(default_factory=set)
    refusals: set[str] = field(default_factory=set)
    is_rewritten: bool = False
    pending: list[Lookups] = field(default_factory=list)


@dataclass(frozen=True)
class ReadSpan:
    """The part of a storage a parameter covers: elements `start` up to `stop`."""

    name: str
    start: int
    stop: int


class WatchReads(TorchDispatchMode):
    """While active, notes every read of the parameters given.

    Look-ups are counted only while `counts_lookups`: a checkpointed stage gathers once more in its backward pass.

    Args:
        parameters: each parameter once, under its name.
        before_write: called with a parameter just before an operation writes into it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], before_write: Callable[[nn.Parameter], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.readings = {name: Reading(parameter) for name, parameter in parameters.items()}
        self.before_write = before_write
        self.counts_lookups = True
        self.views = WeakTensorKeyDictionary()  # of parameters, but for plain aliases
        self.spans: dict[int, list[ReadSpan]] = {}
        for name, parameter in parameters.items():
            self.spans.setdefault(_storage(parameter), []).append(ReadSpan(name, *_extent(parameter)))
        for spans in self.spans.values():
            for mine in spans:
                others = (span for span in spans if span is not mine)
                if sharing := [span.name for span in others if _meet(mine, span.start, span.stop)]:
                    self.readings[mine.name].refusals.add(SHARED.format(", ".join(sharing)))

    def pending(self) -> dict[str, Lookups]:
        """The lookups since the last `take`, by parameter; those that had none are left out."""
        return {name: merged(reading.pending) for name, reading in self.readings.items() if reading.pending}

    def take(self) -> dict[str, Lookups]:
        """As `pending`, and starts afresh."""
        taken = self.pending()
        for reading in self.readings.values():
            reading.pending = []
        return taken

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self.noted(func, args, kwargs) if self.touches((*args, *kwargs.values())) else func(*args, **kwargs)

    def noted(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation that touches a parameter."""
        self._note(func, _bound(func, args, kwargs))
        result = func(*args, **kwargs)
        is_alias = func is aten.detach.default and args[0] not in self.views
        if func.is_view and isinstance(result, Tensor) and not is_alias:
            self.views[result] = True
        return result

    def _note(self, func: OpOverload, bound: Mapping[str, Any]) -> None:
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for name in self._touched_in(bound.get(argument.name)):
                    self.readings[name].is_rewritten = True
                    self.before_write(self.readings[name].parameter)
        if func.is_view:
            return
        if func._overloadpacket in UNREAD:
            for name in self._touched_in(list(bound.values())):
                self.readings[name].refusals.add(MADE_FROM.format(_short(func)))
            return
        gathered = GATHERS[func][0] if func in GATHERS else COMPANIONS.get(func)
        for argument_name, value in bound.items():
            for name in self._touched_in(value):
                if argument_name != gathered or not self._by_row(func, bound, name, value):
                    self.readings[name].dense.add(_short(func))

    def _by_row(self, func: OpOverload, bound: Mapping[str, Any], name: str, table: Tensor) -> bool:
        """Notes a gather of rows of parameter `name`; False if it does not gather that parameter's rows."""
        reading = self.readings[name]
        if not _has_rows_of(table, reading.parameter):
            return False
        if func in COMPANIONS:
            if func is aten.embedding_renorm_.default:
                reading.refusals.add(MAX_NORM)
            return True
        ids = _row_ids(func, bound)
        if ids is None:
            return False
        reading.gathers.add(_short(func))
        if table.shape != reading.parameter.shape or table in self.views:
            reading.refusals.add(VIEWED)
        if not self.counts_lookups:
            reading.refusals.add(RECOMPUTED)
        if bound.get("scale_grad_by_freq"):
            reading.refusals.add(SCALED)
        if self.counts_lookups:
            padding = bound.get("padding_idx", -1)
            reading.pending.append(_counted(name, ids, len(reading.parameter), None if padding < 0 else padding))
        return True

    def touches(self, arguments: Iterable[object]) -> bool:
        """Whether a tensor among them shares memory with a parameter. Asked at every operation, so without torch's own
        walk, which takes as long as a small operation."""
        for one in arguments:
            if isinstance(one, Tensor):
                if self._touched(one):
                    return True
            elif isinstance(one, (tuple, list)) and self.touches(one):
                return True
        return False

    def _touched(self, leaf: object) -> list[str]:
        """The parameters whose memory a tensor shares."""
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return []
        spans = self.spans.get(_storage(leaf))
        if spans is None:
            return []
        start, stop = _extent(leaf)
        return [span.name for span in spans if _meet(span, start, stop)]

    def _touched_in(self, value: object) -> Iterator[str]:
        for leaf in tree_leaves(value):
            yield from self._touched(leaf)


def _bound(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, without the defaults it did not state."""
    return {**dict(zip((argument.name for argument in func._schema.arguments), args)), **kwargs}


def _short(func: OpOverload) -> str:
    return str(func._overloadpacket.__name__)


def _storage(tensor: Tensor) -> int:
    """A number that tells storages apart while they live; unlike an address it also tells empty ones
    apart."""
    return int(tensor.untyped_storage()._cdata)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and one past the last byte of the storage that the tensor reaches."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()


def _meet(span: ReadSpan, start: int, stop: int) -> bool:
    return span.start < stop and start < span.stop


def _has_rows_of(table: Tensor, parameter: nn.Parameter) -> bool:
    """Whether row r of `table` is all of row r of the parameter: true of `detach()`, `view(rows, -1)`."""
    return (
        parameter.dim() > 0
        and table.dim() > 0
        and table.dtype == parameter.dtype
        and table.shape[0] == parameter.shape[0]
        and table.numel() == parameter.numel()
        and table.storage_offset() == parameter.storage_offset()
        and table.stride(0) == parameter.stride(0)
    )


def _row_ids(func: OpOverload, bound: Mapping[str, Any]) -> Tensor | None:
    """The row numbers asked for, or None where the operation picks something other than rows."""
    ids = bound[GATHERS[func][1]]
    if func is aten.index_select.default and bound["dim"] not in (0, -bound["self"].dim()):
        return None
    if func is aten.index.Tensor:
        if ids[0] is None or any(index is not None for index in ids[1:]):
            return None
        ids = ids[0]
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        return None  # a mask, or bytes used as one
    return ids


def _counted(name: str, ids: Tensor, rows: int, padding: int | None) -> Lookups:
    """
    Raises:
        IndexError: an id is out of range (named here, because the operation itself names no parameter).
    """
    if ids.numel() == 0:
        return replace(NO_LOOKUPS, calls=1, paddings=frozenset([padding]))
    found = ids.detach().flatten().to("cpu", torch.int64)
    distinct, counts = found.unique(return_counts=True)
    low, high = int(distinct[0]), int(distinct[-1])
    if low < -rows or high >= rows:
        raise IndexError(f"profile: look-up of rows {low} to {high} in {name!r}, which has rows 0 to {rows - 1}")
    if low < 0:  # counted from the end
        found = found % rows
        distinct, counts = found.unique(return_counts=True)
    return Lookups(1, distinct, counts, len(distinct), frozenset([padding]))
