"""A model as slices that follow one another: cuts of an `nn.Sequential`, or modules that the user names in order.

Slices share the model's modules, so the model is trained with them. They count only where one after the other they give
the model's own output.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from armillary.models.preserved_state import untouched
from armillary.models.split_loss import Batch, Loss, SplitLoss
from armillary.models.structure import balanced, take_apart

__all__ = ["Slice", "Slices", "sliced"]


class Slice(NamedTuple):
    """path: of its first module in the model, or of one around it; of a module that the user named, its place."""

    path: str
    module: nn.Module


class Slices(NamedTuple):
    """A model cut, and its loss in two halves.

    Args:
        loss: `input_of(batch)` are the model's arguments, `of_output(output, batch)` the scalar.
        outputs: of every slice on the example; without a graph.
    """

    slices: tuple[Slice, ...]
    loss: SplitLoss
    outputs: tuple[Any, ...]


def sliced(
    model: nn.Module, loss: Loss, example: Batch, at: Sequence[str] | int, parts: Sequence[nn.Module] | None
) -> Slices:
    """
    Args:
        at: paths of the modules that begin the second slice, the third, and so on; or how many slices of equal work.
        parts: instead of `at`: modules whose calls one after the other are the model's forward.

    Raises:
        ValueError: there is one slice alone; a path that names no cut; slices that share a weight, leave one out, or
            give another output than the model; a loss that does more than call the model once.
    """
    if parts is not None:
        slices = tuple(Slice(str(number), part) for number, part in enumerate(parts))
    elif isinstance(at, int):
        slices = tuple(_at(model, _balanced(model, loss, example, at)))
    else:
        slices = tuple(_at(model, [at] if isinstance(at, str) else list(at)))
    if len(slices) < 2:
        raise ValueError(
            "local_losses: one part alone learns as by backpropagation; name where the second begins, as in "
            f"at=[{_paths(model)[-1]!r}]"
        )
    _refuse_shared(model, slices)
    try:
        halves = SplitLoss(loss, model, example)
    except ValueError as error:
        raise ValueError(f"local_losses: {str(error).removeprefix('schedule: ')}") from error
    return Slices(slices, halves, _outputs(model, slices, halves.input_of(example)))


def _opened(model: nn.Module, before: str = "") -> Iterator[Slice]:
    """The modules of an `nn.Sequential` in order, those of nested ones in their place."""
    for name, module in model._modules.items():
        if module is not None and type(module).forward is nn.Sequential.forward and len(module._modules):
            yield from _opened(module, f"{before}{name}.")
        elif module is not None:
            yield Slice(f"{before}{name}", module)


def _paths(model: nn.Module) -> list[str]:
    return [one.path for one in _opened(model)] or [""]


def _balanced(model: nn.Module, loss: Loss, example: Batch, count: int) -> list[str]:
    """Where to cut so that the dearest slice is as cheap as can be, in operations and numbers of a forward."""
    modules, ends = list(_opened(model)), [0.0]

    def ended(module: nn.Module, given: Any, output: Any) -> None:
        numbers = sum(leaf.numel() for leaf in take_apart(output).leaves if isinstance(leaf, Tensor))
        ends.append(ends[-1] + counter.get_total_flops() - counted[-1] + numbers)
        counted.append(counter.get_total_flops())

    counted = [0]
    with untouched(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        hooks = [one.register_forward_hook(ended) for one in {module for _, module in modules}]
        try:
            loss(model, example)
        finally:
            for hook in hooks:
                hook.remove()
    costs = [(end - before, 2 * (end - before)) for before, end in pairwise(ends)]
    if len(costs) != len(modules) or not 1 < count <= len(modules):
        raise ValueError(
            f"local_losses: at={count} parts of an nn.Sequential with {len(modules)} modules; want 2 parts to as many "
            "as there are, or name the cuts: at=['layer2']"
        )
    return [modules[start].path for start in balanced(costs, count)]


def _at(model: nn.Module, points: Sequence[str]) -> Iterator[Slice]:
    if type(model).forward is not nn.Sequential.forward:
        raise ValueError(
            f"local_losses: a {type(model).__name__} is no nn.Sequential, so at={points} names no cut; give "
            "parts=[module, ...], whose calls one after the other are its forward"
        )
    modules = list(_opened(model))
    starts = [next((n for n, one in enumerate(modules) if _begins(one.path, point)), 0) for point in points]
    edges = [0, *starts, len(modules)]
    if any(after <= before for before, after in pairwise(edges)):
        raise ValueError(
            f"local_losses: at={points} must name modules of the nn.Sequential in their order, and not its first; they "
            f"are {', '.join(_paths(model))}"
        )
    for name, (first, end) in zip([modules[0].path, *points], pairwise(edges), strict=True):
        named = OrderedDict((one.path.replace(".", "_"), one.module) for one in modules[first:end])
        yield Slice(name, nn.Sequential(named))


def _begins(path: str, point: str) -> bool:
    """Whether the point is the module, or one around it; a part's name has no dots."""
    return f"{path}.".startswith(f"{point}.") or path.replace(".", "_") == point


def _refuse_shared(model: nn.Module, slices: Sequence[Slice]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first: dict[int, int] = {}
    for number, one in enumerate(slices):
        for parameter in one.module.parameters():
            if first.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"local_losses: parts {first[id(parameter)]} and {number} share "
                    f"{names.get(id(parameter), 'a weight')}, which would learn from two losses; cut so that one part "
                    "holds it, or untie it"
                )
    if missing := [name for key, name in names.items() if key not in first]:
        raise ValueError(f"local_losses: no part holds {', '.join(missing[:3])}; every weight must be in one of them")


@torch.no_grad()
def _outputs(model: nn.Module, slices: Sequence[Slice], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """On the example; nothing is left changed.

    Raises:
        ValueError: they end in another output than the model's.
    """
    with untouched(model):
        torch.manual_seed(0)
        whole = model(*given)
    with untouched(model):
        torch.manual_seed(0)
        found: list[Any] = []
        for one in slices:
            found.append(one.module(*given) if not found else one.module(found[-1]))
    (leaves, structure), (mine, own) = take_apart(whole), take_apart(found[-1])
    if structure != own or not all(map(_same, leaves, mine)):
        raise ValueError(
            f"local_losses: the parts one after the other give another output than the {type(model).__name__}; a hook "
            "or a step between them changes it: put it into a part"
        )
    return tuple(found)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    return bool(one == other)
