"""A model cut into stages: consecutive parts, each a module from one value to the next.

A value is a tensor, or any nest of tuples, lists and dicts of tensors, so skip connections can travel along. Chains of
modules are cut here: an `nn.Sequential`, or a model whose forward applies modules one after the other, named by path.
What is no chain goes through the tracer (`stages/tracer.py`).

Stages share their parameters with the model, which stays whole: it is evaluated and saved as it always was.

Where to cut is `models/structure.py`'s; the planner asks it too.

Where the parameters of a module stand in it, so that others can stand there for a while.

What `torch.func.functional_call` does, which looks for every place anew at each call: where a stage has many small
parameters, that took longer than its layers. A stage's places stay as they are, so they are found once. A parameter
that several modules share has several.

Buffers as the forwards of a stage found them, for those forwards that run again before their backward.

A second run reads what the first one read, and moves nothing a second time. Copies are kept only of buffers that were
written since. That is seen by values: torch's batch norm raises no version counters (torch 2.13).
"""

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from armillary.models.structure import Cost, TakenApart, balanced, take_apart
from armillary.schedules.ties import ParameterUse, refuse_chains

__all__ = [
    "ChainModule",
    "Cost",
    "Found",
    "FoundBuffers",
    "Places",
    "Stage",
    "Tie",
    "balanced",
    "chain",
    "costs",
    "cut",
    "same_as_model",
    "ties_between",
    "ties_of",
]


class Places:
    """Of the parameters and buffers of a module, by the names that it gives them."""

    def __init__(self, module: nn.Module) -> None:
        named = [*module.named_parameters(), *module.named_buffers()]
        names = {id(tensor): name for name, tensor in named}
        found: dict[str, list[tuple[dict[str, Any], str]]] = defaultdict(list)
        for part in module.modules():
            for kept in (part._parameters, part._buffers):
                for key, tensor in kept.items():
                    if tensor is not None:
                        found[names[id(tensor)]].append((kept, key))
        self._found = dict(found)

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """These stand there meanwhile, by name; what stood there before comes back."""
        before = [(kept, key, kept[key]) for name in tensors for kept, key in self._found[name]]
        try:
            for name, tensor in tensors.items():
                for kept, key in self._found[name]:
                    kept[key] = tensor
            yield
        finally:
            for kept, key, tensor in before:
                kept[key] = tensor


@dataclass(eq=False)
class Found:
    """What one forward found in the buffers that it or a later one has written, by name."""

    written: dict[str, Tensor] = field(default_factory=dict)


class FoundBuffers:
    """Of one stage's module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._pending = WeakSet[Found]()  # of forwards that may still run again

    @contextmanager
    def forward(self) -> Iterator[Found]:
        """Around a forward that is to run again, as long as what it found is held."""
        found = Found()
        self._pending.add(found)
        before = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        yield found
        for name, buffer in self._module.named_buffers():
            if not torch.equal(buffer, before[name]):
                for one in self._pending:
                    one.written.setdefault(name, before[name])

    def again(self, found: Found) -> dict[str, Tensor]:
        """What stands in the places of all buffers while that forward runs again; it may write them."""
        return {name: found.written.get(name, buffer).clone() for name, buffer in self._module.named_buffers()}


class ChainModule(NamedTuple):
    """One module of a chain. path: in the model."""

    path: str
    module: nn.Module


class Tie(NamedTuple):
    """Parameters that a stage shares with an earlier one, which owns them. parameters: by the model's names."""

    owner: int
    parameters: dict[str, nn.Parameter]


@dataclass(frozen=True, eq=False)
class Stage:
    """One part of a model.

    Args:
        names: of the model's parameters, by the module's own names.
        aliases: by the model's name, under which other name this stage reads a tied parameter.
    """

    index: int
    module: nn.Module
    names: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def places(self) -> Places:
        """Where the module's tensors stand."""
        return Places(self.module)

    @cached_property
    def buffers(self) -> FoundBuffers:
        """What forwards found in the module's buffers."""
        return FoundBuffers(self.module)


def chain(model: nn.Module, paths: Sequence[str] = ()) -> list[ChainModule]:
    """The modules a model applies one after the other.

    Args:
        paths: of modules in the order of application; a list or `nn.Sequential` stands for its members. Without paths
            the model must be an `nn.Sequential`; nested ones are opened.

    Raises:
        ValueError: no chain, a path that is not there, or parameters that no module of the chain holds.
    """
    if not paths and not isinstance(model, nn.Sequential):
        raise ValueError(
            f"stages: a {type(model).__name__} is no nn.Sequential; name the modules its forward applies in order, "
            f"for example paths={[name for name, _ in model.named_children()]}, or cut it by tracing"
        )
    found: list[ChainModule] = []
    for path in paths or list(model._modules):  # `named_children` leaves out a module's second place
        found += _members(path, _at(model, path), nested=not paths)
    inside = {id(parameter) for _, module in found for parameter in module.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    if outside:
        raise ValueError(f"stages: no module of the chain {[path for path, _ in found]} holds {', '.join(outside)}")
    return found


def costs(links: Sequence[ChainModule], value: Any) -> list[Cost]:
    """Forward and backward cost of every link, counted on one value; the same on every machine.

    Floating-point operations of matrix products, convolutions and attention, plus one per number that comes out, so
    that links without such an operation are not free. Nothing is left changed but the buffers of the links.
    """
    found: list[Cost] = []
    for _, module in links:
        value = _leaf(value)
        with FlopCounterMode(display=False) as forward:
            result = module(value)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        numbers = sum(output.numel() for output in outputs)
        back = [output for output in outputs if output.requires_grad]
        with FlopCounterMode(display=False) as backward:
            sources = [*module.parameters(), *(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))]
            sources = [source for source in sources if source.requires_grad]
            if back and sources:
                torch.autograd.grad([output.sum() for output in back], sources, allow_unused=True)
        found.append((float(forward.get_total_flops() + numbers), float(backward.get_total_flops() + 2 * numbers)))
        value = result
    return found


def cut(model: nn.Module, links: Sequence[ChainModule], points: Sequence[int]) -> list[Stage]:
    """Stages of a chain, a new one beginning at each of `points` (positions in `links`, rising, none of them 0).

    Raises:
        ValueError: points out of order.
    """
    edges = [0, *points, len(links)]
    if any(after <= before for before, after in pairwise(edges)):
        raise ValueError(f"stages: cannot cut {len(links)} modules at {tuple(points)}; want rising points inside")
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    stages: list[Stage] = []
    for index, (start, end) in enumerate(pairwise(edges)):
        part = links[start:end]
        module = nn.Sequential(OrderedDict((str(place), module) for place, (_, module) in enumerate(part)))
        read = {id(p): f"{path}.{name}" for path, link in reversed(part) for name, p in link.named_parameters()}
        names = {local: own[id(parameter)] for local, parameter in module.named_parameters()}
        aliases = {own[one]: name for one, name in read.items() if own[one] != name}
        stages.append(Stage(index, module, names, aliases))
    return stages


def ties_between(stages: Sequence[Stage]) -> Iterator[tuple[ParameterUse, ParameterUse]]:
    """The first use of every parameter that several stages read, and each later one."""
    first: dict[int, ParameterUse] = {}
    for stage in stages:
        for local, parameter in stage.module.named_parameters():
            name = stage.names[local]
            here = ParameterUse(stage.index, stage.aliases.get(name, name))
            if first.setdefault(id(parameter), here) != here:
                yield first[id(parameter)], here


def ties_of(stages: Sequence[Stage]) -> dict[int, Tie]:
    """What is trained and shared, by the stage that holds copies.

    Raises:
        ValueError: a stage holds copies of several others' parameters.
    """
    named = {stage.names[n]: p for stage in stages for n, p in stage.module.named_parameters() if p.requires_grad}
    held = [[name for name in dict.fromkeys(stage.names.values()) if name in named] for stage in stages]
    first = {name: stage.index for stage, names in zip(reversed(stages), reversed(held)) for name in names}
    owners: dict[int, set[int]] = {}
    shared: dict[int, dict[str, nn.Parameter]] = {}
    for stage, names in zip(stages, held, strict=True):
        for name in names:
            if first[name] != stage.index:
                owners.setdefault(stage.index, set()).add(first[name])
                shared.setdefault(stage.index, {})[name] = named[name]
    return {stage: Tie(owner, shared[stage]) for stage, owner in refuse_chains(owners).items()}


def same_as_model(
    model: nn.Module, stages: Sequence[Stage], value: Any, call: Callable[[Any], Any] | None = None
) -> None:
    """Runs both on one value with the same random numbers; a cheap proof that the stages are the model's forward: its
    output, structure and values, and its buffers.

    Args:
        call: of the model with the value, where that is not its one argument.

    Raises:
        ValueError: they differ, or a forward writes a buffer that two stages hold, each of which would have its own.
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    seen = []
    for modules in ([call or model], [stage.module for stage in stages]):
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(random.Random(0).getrandbits(31))
            result = value
            for module in modules:
                result = module(result)
        seen.append(_Seen(take_apart(result), {name: buffer.clone() for name, buffer in model.named_buffers()}))
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    whole, cut_up = seen
    written = [name for name in kept if not _same(kept[name], whole.buffers[name])]
    _refuse_shared_buffers(model, stages, written)
    lacking = [f"leave {name} another buffer" for name in kept if not _same(whole.buffers[name], cut_up.buffers[name])]
    if whole.output.structure != cut_up.output.structure:
        lacking.append(f"return {cut_up.output.structure} instead of {whole.output.structure}")
    elif not all(map(_same, whole.output.leaves, cut_up.output.leaves)):
        lacking.append("return other values")
    if lacking:
        named = ", ".join(written[:3])
        why = f". Its forward changes buffers ({named}), which the stages do not change alike" if written else ""
        raise ValueError(
            f"stages: the {len(stages)} stages one after the other do not compute what {type(model).__name__} does: "
            f"they {lacking[0]}{why}. Put its modules into an nn.Sequential in the order of their calls, or plan "
            f"without a schedule that cuts"
        )


class _Seen(NamedTuple):
    """What a forward gives and leaves."""

    output: TakenApart
    buffers: Mapping[str, Tensor]


def _same(one: Any, other: Any) -> bool:
    """Bit for bit; what is not a number is the same as itself."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    return bool(one == other)


def _refuse_shared_buffers(model: nn.Module, stages: Sequence[Stage], written: Collection[str]) -> None:
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    first: dict[str, int] = {}
    for stage in stages:
        for buffer in stage.module.buffers():
            name = names.get(id(buffer), "")
            if name in written and first.setdefault(name, stage.index) != stage.index:
                raise ValueError(
                    f"stages: the forward changes buffer {name}, which stages {first[name]} and {stage.index} both "
                    f"hold; each would change its own. Cut so that one stage holds it, or give each its own module"
                )


def _at(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as missing:
        raise ValueError(f"stages: {type(model).__name__} has no module {path!r}: {missing}") from None


def _members(path: str, module: nn.Module, nested: bool) -> list[ChainModule]:
    """A list stands for its members; inside an `nn.Sequential` model, nested ones are opened all the way down."""
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        return [ChainModule(path, module)]
    members = [ChainModule(f"{path}.{name}", member) for name, member in module._modules.items() if member is not None]
    return [
        link
        for name, member in members
        for link in (_members(name, member, True) if nested else [ChainModule(name, member)])
    ]


def _leaf(value: Any) -> Any:
    """The value cut off from what made it, ready to receive gradients."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), value
    )
