"""The truth of coded edges: inside one graph, what decoding a code gives instead of a value, and of its gradient.

A value goes on as its codec means it (`Codec.meaning`, which knows no bytes). Its gradient comes back as the codec of
the way back means it, and passes by the value's codec as if that were not there. Which values are coded, and which
random numbers are drawn, `schedules/edges.py` says. An edge that remembers samples has one value a sample here: the
last
that arrived. By which samples are known again, `schedules/edges.py` says.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from armillary.schedules.edges import Codes, EdgeCode, draw_of, is_codable, sample_keys
from armillary.schedules.random_streams import plain
from armillary.schedules.schedule import Cell

__all__ = ["Edges"]

Meaning = Callable[[Tensor], Tensor]


class _Samples(NamedTuple):
    """Of a micro-batch, by key; whose replica's."""

    keys: Sequence[bytes]
    replica: int


@dataclass(frozen=True)
class Edges:
    """
    Args:
        codes: none: every value crosses as it is. seed: of the run. stages: of the model.
        samples: how many crossed so far where some are remembered, "whole" and as a "change".
    """

    codes: Codes = field(default_factory=dict)
    seed: int = 0
    stages: int = 1
    held: dict[tuple[int, int, int], dict[bytes, Tensor]] = field(default_factory=dict)  # by replica, stage and leaf
    samples: Counter[str] = field(default_factory=Counter)

    def crossed(self, value: Any, came: Any, place: Cell, read: Any, replica: int = 0) -> Any:
        """What the next stage gets of a value.

        Args:
            came: what the stage itself had got; what it hands on unchanged is not coded.
            place: that made the value, micro-batches being those of all replicas.
            read: what the first stage read of the micro-batch. replica: whose it is.
        """
        code = self.codes.get(("activation", place[2]))
        samples = _Samples(sample_keys(read) if code is not None and code.cache_bytes else (), replica)
        leaves, spec = tree_flatten(value)
        others = {id(leaf) for leaf in tree_flatten(came)[0]}
        return tree_unflatten(
            [
                self._crossed(leaf, number, place, id(leaf) in others, samples) if isinstance(leaf, Tensor) else leaf
                for number, leaf in enumerate(leaves)
            ],
            spec,
        )

    def _crossed(self, tensor: Tensor, number: int, place: Cell, is_passed_on: bool, samples: _Samples) -> Tensor:
        there: Meaning = plain
        back: Meaning | None = plain  # None: zeros where zeros arrived
        step, micro_batch, stage = place
        if tensor.requires_grad and is_codable(tensor) and not is_passed_on:
            codes = self.codes.get(("activation", stage)), self.codes.get(("activation gradient", stage + 1))
            there = self._meaning(codes[0], place, number, is_back=False) or plain
            if codes[0] is not None and codes[0].cache_bytes and step >= codes[0].warm_up:
                there = self._changed(there, samples, (stage, number), codes[0].cache_bytes)
            back = self._meaning(codes[1], (step, micro_batch, stage + 1), number, is_back=True)
        crossed: Tensor = _Crossing.apply(tensor, there, back)  # type: ignore[no-untyped-call]
        return crossed

    def _meaning(self, code: EdgeCode | None, place: Cell, number: int, is_back: bool) -> Meaning | None:
        if code is None or place[0] < code.warm_up:
            return plain
        draw = draw_of(code.codec, self.seed, place, number, self.stages, is_back)

        def meaning(tensor: Tensor) -> Tensor:
            with torch.autocast(tensor.device.type, enabled=False):
                return plain(code.codec.meaning(tensor.reshape(-1), draw).view(tensor.shape))

        return None if code.follows else meaning

    def _changed(self, meaning: Meaning, samples: _Samples, at: tuple[int, int], cache_bytes: int) -> Meaning:
        """Of samples that are held their change by its meaning, of others all; and they are held from now on."""
        keys, replica = samples
        held = self.held.setdefault((replica, *at), {})

        def arrived(values: Tensor) -> Tensor:
            found, most = values.clone(), max(1, cache_bytes // max(1, values[0].numel() * values.itemsize))
            known = [number for number, key in enumerate(keys) if key in held]
            self.samples.update(whole=len(keys) - len(known), change=len(known))
            if known:
                old = torch.stack([held[keys[number]] for number in known])
                found[known] = old + meaning(values[known] - old)
            for key, value, one in zip(keys, values, found, strict=True):
                if key not in held and bool(value.isfinite().all()):
                    oldest = next((other for other in held if other not in keys), None)
                    if len(held) >= most and oldest is not None:
                        del held[oldest]
                    if len(held) < most:
                        held[key] = one
                elif key in held and bool(one.isfinite().all()):
                    held[key] = one
            return found

        return arrived


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Meaning, back: Meaning | None) -> Tensor:
        ctx.set_materialize_grads(False)  # a value that nobody uses has no gradient, rather than zeros
        arrived = there(tensor)
        ctx.back = _at(arrived != 0) if back is None else back
        return arrived.detach()  # a stage may write in its place; what a codec made cannot be a view for autograd

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        return None if gradient is None else ctx.back(plain(gradient)), None, None


def _at(is_kept: Tensor) -> Meaning:
    """Zeros elsewhere; what is not finite anywhere is not a number anywhere."""

    def meaning(gradient: Tensor) -> Tensor:
        kept = torch.where(is_kept, gradient, torch.zeros_like(gradient))
        return plain(kept if bool(gradient.isfinite().all()) else torch.full_like(gradient, torch.nan))

    return meaning
