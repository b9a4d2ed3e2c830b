"""The structure of values and of models: nests, marks, stages by path, and balanced cuts.

Nests are torch's pytree, and dataclasses besides: many models return one that nobody registered, and to register it
here would change torch for the whole process. A mark says what is being done to a model, so that what does not go with
it can refuse by name.

Stages are modules given by their paths. Parameters belong to stages and costs are counted by stage, so both use
`stage_of`. Work outside every stage (the loss, the glue) belongs to the stage "".

Source: the balanced cut is torchgpipe's (Kim et al., 2020), by exact search instead of heuristic.
"""

import enum
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_flatten, tree_unflatten

__all__ = [
    "OUTSIDE",
    "Cost",
    "Structure",
    "TakenApart",
    "balanced",
    "following",
    "mapped",
    "mark_model",
    "marked",
    "passes_alike",
    "stage_of",
    "stage_paths",
    "take_apart",
    "unmark_model",
    "unopened",
]

_MARKS: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_ALIKE: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def mark_model(model: nn.Module, what: str, *, needs_alike_passes: bool = False) -> None:
    """
    Args:
        what: in words that follow "the model", with the remedy.
        needs_alike_passes: of ranks that no process group of the run joins; so none may look at the model alone, or as
            often as its clock says.
    """
    _MARKS[model] = what
    if needs_alike_passes:
        _ALIKE.add(model)


def passes_alike(model: nn.Module) -> str:
    """The mark on it, or inside it, that wants as many passes on every rank; empty if there is none."""
    return next((_MARKS[module] for module in model.modules() if module in _ALIKE), "")


def unmark_model(model: nn.Module) -> None:
    _MARKS.pop(model, None)
    _ALIKE.discard(model)


def marked(model: nn.Module) -> str:
    """The mark on it or on a module inside it; empty if there is none."""
    return next((_MARKS[module] for module in model.modules() if module in _MARKS), "")


OUTSIDE = ""


def stage_paths(model: nn.Module, wanted: Sequence[str] = ()) -> tuple[str, ...]:
    """The stages: the paths wanted, or else the model's children.

    A child that is only a container (`ModuleList`, `ModuleDict`) is never called itself, so its own children
    stand for it.

    Raises:
        ValueError: a wanted path names no module, or is wanted twice.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if wanted:
        wrong = [path for path in wanted if path not in modules or path == OUTSIDE]
        if wrong or len(set(wanted)) < len(wanted):
            known = ", ".join(path for path in modules if path)
            raise ValueError(f"profile: stages {list(wanted)} must be different modules; there are {known}")
        return tuple(wanted)
    paths: list[str] = []
    queue = [name for name, _ in model.named_children()]
    while queue:
        path = queue.pop(0)
        children = [f"{path}.{name}" for name, _ in modules[path].named_children()]
        if isinstance(modules[path], nn.ModuleList | nn.ModuleDict):
            queue = children + queue
        else:
            paths.append(path)
    return tuple(paths)


def stage_of(path: str, stages: Sequence[str]) -> str:
    """The innermost stage that holds the module or parameter at `path`; "" if none does."""
    holders = [stage for stage in stages if path == stage or path.startswith(f"{stage}.")]
    return max(holders, key=len, default=OUTSIDE)


@contextmanager
def following(
    model: nn.Module,
    stages: Sequence[str],
    enter: Callable[[str, Any], None],
    leave: Callable[[str, Any], None],
) -> Iterator[None]:
    """Calls enter(stage, inputs) and leave(stage, outputs) around every module of a stage, nested ones
    too."""
    handles: list[Any] = []
    for path, module in model.named_modules():
        stage = stage_of(path, stages)
        if stage == OUTSIDE:
            continue

        def before(_: nn.Module, args: Any, kwargs: Any, stage: str = stage) -> None:
            enter(stage, (args, kwargs))

        def after(_: nn.Module, args: Any, output: Any, stage: str = stage) -> None:
            leave(stage, output)

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


Cost = tuple[float, float]  # forward, backward; any unit


def balanced(link_costs: Sequence[Cost], stages: int) -> tuple[int, ...]:
    """Where to cut so that the dearest stage is as cheap as can be: the first link of every stage but the first.

    Raises:
        ValueError: fewer links than stages.
    """
    count = len(link_costs)
    if not 1 <= stages <= count:
        raise ValueError(
            f"stages: {count} modules make no {stages} stages; name more of them in the order of their calls, as in "
            "stages=['net.0', 'net.2'] (to parallelize, auto_plan or profile), or take fewer stages"
        )
    before = [0.0]
    for forward, backward in link_costs:
        before.append(before[-1] + forward + backward)
    # best[end]: (dearest stage, cuts) of the first `end` links in as many stages as rounds so far
    best: list[tuple[float, tuple[int, ...]] | None] = [(before[end], ()) if end else None for end in range(count + 1)]
    for _ in range(stages - 1):
        longer: list[tuple[float, tuple[int, ...]] | None] = [None] * (count + 1)
        for end in range(1, count + 1):
            options = [
                (max(start_best[0], before[end] - before[start]), (*start_best[1], start))
                for start in range(1, end)
                if (start_best := best[start]) is not None
            ]
            longer[end] = min(options) if options else None
        best = longer
    chosen = best[count]
    assert chosen is not None, f"{stages=} {count=}"
    return chosen[1]


CONSTANTS = (
    bool, int, float, complex, str, bytes, type(None), type, enum.Enum, slice, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip


@dataclass(frozen=True)
class Structure:
    """What is left of a nest without its leaves. Two are equal where the nests are alike.

    Args:
        spec: of torch, to which a dataclass is a leaf.
        records: by leaf of that: the dataclass that stands there, or None.
    """

    spec: TreeSpec
    records: tuple["_Record | None", ...]

    @property
    def count(self) -> int:
        """Of leaves."""
        return sum(1 if one is None else one.inside.count for one in self.records)

    def put_together(self, leaves: Sequence[Any]) -> Any:
        """
        Raises:
            ValueError: another number of leaves.
        """
        if len(leaves) != self.count:
            raise ValueError(f"structure: {self.count} leaves are wanted, got {len(leaves)}")
        rest, parts = list(leaves), list[Any]()
        for record in self.records:
            count = 1 if record is None else record.inside.count
            mine, rest = rest[:count], rest[count:]
            parts.append(mine[0] if record is None else record.made_of(mine))
        return tree_unflatten(parts, self.spec)

    def __str__(self) -> str:
        return str(self.put_together([_Star()] * self.count))


@dataclass(frozen=True)
class _Record:
    """A dataclass: what it is, what its attributes are called, how they are nested."""

    kind: type
    names: tuple[str, ...]
    inside: Structure

    def made_of(self, leaves: Sequence[Any]) -> Any:
        """Without a call of its constructor, which may want other arguments."""
        made: Any = object.__new__(self.kind)
        for name, value in zip(self.names, self.inside.put_together(leaves), strict=True):
            object.__setattr__(made, name, value)
        return made


class _Star:
    def __repr__(self) -> str:
        return "*"


class TakenApart(NamedTuple):
    """leaves: tensors, and what else stands in the nest."""

    leaves: list[Any]
    structure: Structure


def take_apart(value: Any) -> TakenApart:
    """A dataclass holds the attributes that are set."""
    parts, spec = tree_flatten(value, is_leaf=_is_record)
    leaves, records = list[Any](), list[_Record | None]()
    for part in parts:
        if not _is_record(part):
            leaves.append(part)
            records.append(None)
            continue
        names = dict.fromkeys(one.name for one in fields(part) if hasattr(part, one.name))
        names |= dict.fromkeys(vars(part) if hasattr(part, "__dict__") else ())
        inside = take_apart([getattr(part, name) for name in names])
        leaves += inside.leaves
        records.append(_Record(type(part), tuple(names), inside.structure))
    return TakenApart(leaves, Structure(spec, tuple(records)))


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nest with every tensor changed."""
    leaves, structure = take_apart(value)
    return structure.put_together([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def unopened(value: Any) -> str:
    """The class of a leaf that is no tensor and no constant, so that tensors may hide in it; empty if there is none."""
    others = (leaf for leaf in take_apart(value).leaves if not isinstance(leaf, (Tensor, *CONSTANTS)))
    return next((type(leaf).__name__ for leaf in others), "")


def _is_record(value: Any) -> bool:
    if isinstance(value, (type, Tensor, nn.Module, dict, list, tuple)) or type(value) in SUPPORTED_NODES:
        return False
    return is_dataclass(value)
