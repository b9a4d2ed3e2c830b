"""Evaluation under coded edges: what the first module of a stage reads has crossed its edge, as in training.

The model is evaluated whole, so nothing crosses; what decoding would give stands in its place (`Codec.meaning`). A
stage's first module shows its edge: of a chain of modules all of it, of a traced model all but what skips that module.
Without gradients nobody sees which values are coded in training, so that is looked at before training begins.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from armillary.codecs.codec import Codec
from armillary.facts.plan import Plan
from armillary.facts.untouched import untouched
from armillary.schedules.edge import Edge, at_eval, is_codable

__all__ = ["CodedLeaves", "coded_leaves", "edges_at_eval"]

CodedLeaves = Sequence[tuple[bool, ...]]  # by edge: of all that the first module behind it is called with


def coded_leaves(model: nn.Module, plan: Plan, value: tuple[Any, ...]) -> CodedLeaves:
    """Which values training codes: those that were made since the last edge and ask for a gradient.

    Args:
        value: an example of what the first stage reads. The model is left as it was.
    """
    if all(stage.edge is None for stage in plan.stages):
        return ()
    value = tree_map_only(Tensor, Tensor.detach, value)
    came: dict[int, Any] = {id(leaf): leaf for leaf in tree_leaves(value)}  # held, so that each keeps its number
    found: list[tuple[bool, ...]] = []

    def look(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        leaves = tree_leaves((given, named))
        found.append(tuple(_asks(leaf) and id(leaf) not in came for leaf in leaves))
        came.update({id(leaf): leaf for leaf in leaves})

    with untouched(model), ExitStack() as stack, torch.enable_grad():
        for stage in plan.stages[1:]:
            first = model.get_submodule(stage.begins)
            stack.callback(first.register_forward_pre_hook(look, with_kwargs=True).remove)
        model(*value)
    return found


def _asks(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and is_codable(leaf)


@contextmanager
def edges_at_eval(model: nn.Module, plan: Plan, step: int, coded: CodedLeaves) -> Iterator[None]:
    """Inside, the model reads what has crossed coded edges, where the plan does not switch that off.

    Args:
        step: of the training; edges that are still warming up are not coded.
    """
    handles = []
    for below, above, leaves in zip(plan.stages, plan.stages[1:], coded, strict=False):
        codec = at_eval(Edge(below.edge), step)
        if codec is not None:
            hook = _crossing(codec, leaves)
            handles.append(model.get_submodule(above.begins).register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _crossing(codec: Codec, coded: tuple[bool, ...]) -> Any:
    def arrived(tensor: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(0) if codec.draws else None  # the same for every batch
        with torch.autocast(tensor.device.type, enabled=False):
            return codec.meaning(tensor.reshape(-1), draw).view(tensor.shape)

    def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((given, named))
        if len(leaves) != len(coded):
            raise ValueError(
                f"evaluate: {type(module).__name__}, which begins a stage behind a coded edge, reads {len(leaves)} "
                f"values, and read {len(coded)} of the example; evaluate on batches of its form, or code the edge "
                f"with at_eval=off"
            )
        return tree_unflatten([arrived(leaf) if is_coded else leaf for leaf, is_coded in zip(leaves, coded)], spec)

    return hook
