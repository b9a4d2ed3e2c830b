"""Evaluation under coded edges: what the first module of a stage reads has crossed its edge, as in training.

The model is evaluated whole, so nothing crosses; what decoding would give stands in its place (`Codec.meaning`). A
stage's first module shows its edge: of a chain of modules all of it, of a traced model all but what skips that module.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from armillary.codecs.codec import Codec
from armillary.facts.plan import Plan
from armillary.schedules.edge import Edge, at_eval, is_codable

__all__ = ["edges_at_eval"]


@contextmanager
def edges_at_eval(model: nn.Module, plan: Plan, step: int) -> Iterator[None]:
    """Inside, the model reads what has crossed coded edges, where the plan does not switch that off.

    Args:
        step: of the training; edges that are still warming up are not coded.
    """
    handles = []
    for below, above in zip(plan.stages, plan.stages[1:], strict=False):
        codec = at_eval(Edge(below.edge), step)
        if codec is not None:
            hook = _crossing(codec)
            handles.append(model.get_submodule(above.begins).register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _crossing(codec: Codec) -> Any:
    def arrived(tensor: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(0) if codec.draws else None  # the same for every batch
        with torch.autocast(tensor.device.type, enabled=False):
            return codec.meaning(tensor.reshape(-1), draw).view(tensor.shape) if is_codable(tensor) else tensor

    def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        args, keywords = tree_map_only(Tensor, arrived, (given, named))
        return args, keywords

    return hook
