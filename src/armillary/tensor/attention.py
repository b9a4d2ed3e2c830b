"""Attention inside a region: nn.MultiheadAttention by its parts, and what becomes of each call of
scaled_dot_product_attention where rows, heads or tokens are cut.

Heads are cut by the linear layers before, so a call has fewer of them and is left alone, but for its mask. Where
tokens are cut, an all-to-all gives each rank all tokens of some heads and takes them back (DeepSpeed-Ulysses), or keys
and values go round (`ring.py`).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from armillary.tensor.collectives import applied, crossed
from armillary.tensor.groups import MeshAxis
from armillary.tensor.region import Region, padded
from armillary.tensor.ring import RingAttention, RingCall

__all__ = ["AttentionCall", "CutAttention", "attend"]


class CutAttention(nn.MultiheadAttention):
    """Gives (output, None): no weights are made. Its input projection is one linear layer, whose outputs are cut."""

    in_proj: nn.Linear

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if not (query is key and key is value):
            raise ValueError("tensor: attention inside a region reads one tensor; want query, key and value the same")
        q, k, v = (
            one.unflatten(-1, (-1, self.head_dim)) for one in self.in_proj(query).chunk(3, -1)
        )  # (samples, tokens, heads, width), or tokens first
        q, k, v = (one.transpose(1, 2) if self.batch_first else one.permute(1, 2, 0, 3) for one in (q, k, v))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads))
        mask = _merged(attn_mask, key_padding_mask, q.dtype)
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, options.get("is_causal", False) and mask is None
        )
        out = (out.transpose(1, 2) if self.batch_first else out.permute(2, 0, 1, 3)).flatten(2)
        return self.out_proj(out), None


def _merged(attn_mask: Tensor | None, key_padding_mask: Tensor | None, kind: torch.dtype) -> Tensor | None:
    """One mask to be added to the scores, where nn.MultiheadAttention's may say True for what is hidden."""
    masks = [attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None, :]]
    given = [one for one in masks if one is not None]
    added = [
        torch.zeros_like(one, dtype=kind).masked_fill(one, float("-inf")) if one.dtype == torch.bool else one
        for one in given
    ]
    return None if not added else added[0] if len(added) == 1 else added[0] + added[1]


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of torch.nn.functional.scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def by(self, attention: Callable[..., Tensor]) -> Tensor:
        options = {name: getattr(self, name) for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}
        return attention(self.query, self.key, self.value, self.attn_mask, **options)


def attend(seen: Region, attention: Callable[..., Tensor], call: AttentionCall) -> Tensor:
    """The call, for what is inside the region.

    Raises:
        ValueError: heads that the axis does not divide; keys of other tokens where tokens are cut; dropout or a
            learned mask in a ring.
    """
    way = seen.way
    if way.exchanges and call.key.shape[-2] != call.query.shape[-2]:
        raise ValueError(
            f"tensor: attention inside region {seen.path!r} has {call.key.shape[-2]} keys for {call.query.shape[-2]} "
            'queries of a rank; where tokens are cut, both must be the region\'s tokens; take way="columns_rows"'
        )
    with seen.seeded(call.query.device, is_whole=False) if call.dropout_p else nullcontext():
        if way.exchanges == "in a ring":
            return _in_a_ring(seen, call)
        if way.exchanges == "by heads":
            return _by_heads(seen, attention, call)
        mask = _mask_piece(seen, call.attn_mask, way.inner_rows, way.heads, call.query)
        return replace(call, attn_mask=mask).by(attention)


def _by_heads(seen: Region, attention: Callable[..., Tensor], call: AttentionCall) -> Tensor:
    axis = seen.mesh.axes[seen.way.tokens[0]]
    pieces = (call.query, call.key, call.value)
    for one in pieces:
        if one.shape[-3] % axis.size:
            raise ValueError(
                f"tensor: {one.shape[-3]} heads are not divisible by {axis.size} ranks along {axis.name!r}; want as "
                'many ranks as divide them, or way="ring"'
            )
    q, k, v = (_redistributed(one, axis, -3, -2)[..., : seen.tokens, :] for one in pieces)
    mask = _mask_piece(seen, call.attn_mask, (), seen.way.tokens, q)
    out = replace(call, query=q, key=k, value=v, attn_mask=mask).by(attention)
    return _redistributed(padded(out, -2, call.query.shape[-2] * axis.size), axis, -2, -3)


def _redistributed(x: Tensor, axis: MeshAxis, split: int, into: int) -> Tensor:
    """From pieces along `into` to pieces along `split`, and back."""
    return crossed(x, lambda x: axis.all_to_all(x, split, into), lambda dy: axis.all_to_all(dy, into, split))


def _in_a_ring(seen: Region, call: AttentionCall) -> Tensor:
    q, k, v, mask = call.query, call.key, call.value, call.attn_mask
    if call.dropout_p or (mask is not None and mask.requires_grad):
        raise ValueError(
            "tensor: a ring takes no attention dropout and no learned mask; set the attention's dropout to 0, or take "
            'way="heads"'
        )
    if (sharing := q.shape[-3] // k.shape[-3]) > 1:
        k, v = (one.repeat_interleave(sharing, -3) for one in (k, v))
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    axis = seen.mesh.axes[seen.way.tokens[0]]
    return applied(RingAttention, q, k, v, RingCall(axis, seen.tokens, call.is_causal, scale, mask))


def _mask_piece(
    seen: Region, mask: Tensor | None, rows: tuple[str, ...], heads: tuple[str, ...], query: Tensor
) -> Tensor | None:
    """What of a mask of the whole activation is for this rank's samples and heads."""
    if mask is None or mask.dim() < 4:
        return mask
    if mask.shape[0] == seen.samples and rows:
        mask = seen.mesh.piece(padded(mask, 0, query.shape[0] * seen.mesh.pieces(rows)), rows, 0)
    if mask.shape[1] > 1 and mask.shape[1] == query.shape[-3] * seen.mesh.pieces(heads):
        mask = seen.mesh.piece(mask, heads, 1)
    return mask
