"""The truth of coded edges: inside one graph, what decoding a code gives instead of a value, and of its gradient.

A value goes on as its codec means it (`Codec.meaning`, which knows no bytes). Its gradient comes back as the codec of
the way back means it, and passes by the value's codec as if that were not there. Which values are coded, and which
random numbers are drawn, `schedules/edge.py` says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from armillary.schedules.edge import Codes, EdgeCode, draw_of, is_codable
from armillary.schedules.layout import plain
from armillary.schedules.schedule import Place

__all__ = ["Edges"]

Meaning = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Edges:
    """
    Args:
        codes: none: every value crosses as it is. seed: of the run. stages: of the model.
    """

    codes: Codes = field(default_factory=dict)
    seed: int = 0
    stages: int = 1

    def crossed(self, value: Any, came: Any, place: Place) -> Any:
        """What the next stage gets of a value.

        Args:
            came: what the stage itself had got; what it hands on unchanged is not coded.
            place: that made the value, micro-batches being those of all replicas.
        """
        leaves, spec = tree_flatten(value)
        others = {id(leaf) for leaf in tree_flatten(came)[0]}
        return tree_unflatten(
            [
                self._crossed(leaf, number, place, id(leaf) in others) if isinstance(leaf, Tensor) else leaf
                for number, leaf in enumerate(leaves)
            ],
            spec,
        )

    def _crossed(self, tensor: Tensor, number: int, place: Place, is_passed_on: bool) -> Tensor:
        there: Meaning = plain
        back: Meaning | None = plain  # None: zeros where zeros arrived
        step, micro_batch, stage = place
        if tensor.requires_grad and is_codable(tensor) and not is_passed_on:
            codes = self.codes.get(("activation", stage)), self.codes.get(("activation gradient", stage + 1))
            there = self._meaning(codes[0], place, number, is_back=False) or plain
            back = self._meaning(codes[1], (step, micro_batch, stage + 1), number, is_back=True)
        crossed: Tensor = _Crossing.apply(tensor, there, back)  # type: ignore[no-untyped-call]
        return crossed

    def _meaning(self, code: EdgeCode | None, place: Place, number: int, is_back: bool) -> Meaning | None:
        if code is None or place[0] < code.warm_up:
            return plain
        draw = draw_of(code.codec, self.seed, place, number, self.stages, is_back)

        def meaning(tensor: Tensor) -> Tensor:
            with torch.autocast(tensor.device.type, enabled=False):
                return plain(code.codec.meaning(tensor.reshape(-1), draw).view(tensor.shape))

        return None if code.follows else meaning


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Meaning, back: Meaning | None) -> Tensor:
        ctx.set_materialize_grads(False)  # a value that nobody uses has no gradient, rather than zeros
        arrived = there(tensor)
        ctx.back = _at(arrived != 0) if back is None else back
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        return None if gradient is None else ctx.back(plain(gradient)), None, None


def _at(is_kept: Tensor) -> Meaning:
    """Zeros elsewhere; what is not finite anywhere is not a number anywhere."""

    def meaning(gradient: Tensor) -> Tensor:
        kept = torch.where(is_kept, gradient, torch.zeros_like(gradient))
        return plain(kept if bool(gradient.isfinite().all()) else torch.full_like(gradient, torch.nan))

    return meaning
