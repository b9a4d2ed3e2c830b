"""Ring self-attention: queries stay, keys and values go round the ranks, and results are merged by log-sum-exp.

Source: Li et al., *Sequence Parallelism: Long Sequence Training from System Perspective*, 2021 (ring self-attention).
Numbers of 16 bits travel as they are and are used in float32, as in PyTorch's own attention.
Departures: blocks are merged as in Milakov and Gimelshein, 2018, so no row of scores of the whole length is ever made;
backward computes probabilities again from the log-sum-exp over the whole length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from armillary.models.split_loss import without_autocast
from armillary.tensor.groups import MeshAxis

__all__ = ["RingAttention", "RingCall"]

SCORES_AT_ONCE = 1 << 19  # numbers in memory, of some queries with one rank's keys


@dataclass(frozen=True)
class RingCall:
    """tokens: of the whole sequence, without padding. mask: None, or over the whole sequence, boolean or added."""

    axis: MeshAxis
    tokens: int
    is_causal: bool
    scale: float
    mask: Tensor | None


class RingAttention(Function):
    """q, k, v: (samples, heads, tokens of this rank, width), as many tokens on every rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: RingCall) -> Tensor:
        axis, held = call.axis, torch.stack([k, v])
        wide = torch.promote_types(q.dtype, torch.float32)
        out, logsum = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:-1], torch.finfo(wide).min, dtype=wide)
        for step in range(axis.size):
            source = (axis.index - step) % axis.size
            keys, values = held.to(wide)
            with without_autocast(q.device.type):
                for part in _parts(call, q, source):
                    scores = _scores(call, q, keys, source, part)
                    block_logsum = scores.logsumexp(-1)
                    block_out = scores.sub_(block_logsum.unsqueeze(-1)).exp_() @ values
                    merged = torch.logaddexp(logsum[..., part], block_logsum)
                    out[..., part, :] *= (logsum[..., part] - merged).exp().unsqueeze(-1)
                    out[..., part, :] += (block_logsum - merged).exp().unsqueeze(-1) * block_out
                    logsum[..., part] = merged
            if step < axis.size - 1:
                held = axis.shift(held)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, logsum)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, logsum = ctx.saved_tensors
        call: RingCall = ctx.call
        axis, held = call.axis, torch.stack([k, v])
        wide = logsum.dtype
        dq, dheld = torch.zeros_like(q, dtype=wide), torch.zeros_like(held)
        own = (dout.to(wide) * out).sum(-1, keepdim=True)
        for step in range(axis.size):
            source = (axis.index - step) % axis.size
            keys, values = held.to(wide)
            dkeys, dvalues = summed = dheld.to(wide)
            with without_autocast(q.device.type):
                for part in _parts(call, q, source):
                    probability = _scores(call, q, keys, source, part).sub_(logsum[..., part].unsqueeze(-1)).exp_()
                    dpart = dout[..., part, :].to(wide)
                    dvalues += probability.mT @ dpart
                    dscores = (dpart @ values.mT).sub_(own[..., part, :]).mul_(probability).mul_(call.scale)
                    dq[..., part, :] += dscores @ keys
                    dkeys += dscores.mT @ q[..., part, :].to(wide)
            dheld = axis.shift(summed.to(held.dtype))  # the last time home
            if step < axis.size - 1:
                held = axis.shift(held)
        return dq.to(q.dtype), dheld[0], dheld[1], None


def _parts(call: RingCall, q: Tensor, source: int) -> Iterator[slice]:
    """Of this rank's queries; none where all keys come later."""
    if call.is_causal and source > call.axis.index:
        return
    at_once = max(1, SCORES_AT_ONCE // (q.shape[:-1].numel() or 1))  # a rank has as many keys as queries
    for begin in range(0, q.shape[-2], at_once):
        yield slice(begin, min(begin + at_once, q.shape[-2]))


def _scores(call: RingCall, q: Tensor, k: Tensor, source: int, part: slice) -> Tensor:
    """Of these queries with the keys of `source`; as small as there is where a key is hidden or is padding."""
    wide, least = k.shape[-2], torch.finfo(k.dtype).min
    scores = (q[..., part, :].to(k.dtype) * call.scale) @ k.mT  # a new tensor, so it is written in place
    rows = torch.arange(part.start, part.stop, device=q.device) + call.axis.index * wide
    columns = torch.arange(wide, device=q.device) + source * wide
    if call.mask is not None:
        mask = call.mask[..., rows.clamp(max=call.mask.shape[-2] - 1), :]
        mask = mask[..., columns.clamp(max=call.mask.shape[-1] - 1)]
        scores = scores.masked_fill_(~mask, least) if mask.dtype == torch.bool else scores.add_(mask)
    hidden = columns >= call.tokens
    if call.is_causal:
        hidden = hidden | (columns > rows.unsqueeze(1))
    return scores.masked_fill_(hidden, least).clamp_min_(least)
