"""What earlier pushes of a group left out: added to what the next one sends, so that no gradient is lost.

Over all steps, what came out and what is left add up to what went in. A residual is kept in the units of gradients; a
GradScaler's scale is a power of two, so nothing is lost where it changes. What overflows on the way is not kept: its
result is not finite, so that step is skipped, and the next begins with what is sound.

Residuals of 16-bit numbers are kept in float32: what is small beside its sum would else be lost (256 + 1 is 256 in
bfloat16).

Source: 1-bit SGD (Seide et al., 2014), and error feedback as DoubleSqueeze (Tang et al., 2019) has it.
"""

import torch
from torch import Tensor

from armillary.codecs.packing import working
from armillary.exchanges.dense import CompletedPush, PushResult
from armillary.plans.parcel import Parcel, State, gaps_of, without_gaps

__all__ = ["RESIDUAL", "alone", "kept_back", "nothing_owed", "owed", "was_owed"]

RESIDUAL = "residual"


def nothing_owed(values: Tensor) -> Tensor:
    """The first residual. values: of the group."""
    return torch.zeros_like(values, dtype=working(values.dtype))


def owed(parcel: Parcel, state: State) -> Tensor:
    """(layout.numel,) what this rank has to send: its values, and what earlier pushes left out, in the residual's
    dtype."""
    if RESIDUAL not in state:
        return parcel.values
    residual = state[RESIDUAL]
    return parcel.values + (residual if parcel.scale == 1 else residual * parcel.scale)


def alone(parcel: Parcel, state: State) -> PushResult:
    """A push where there is no other rank: nothing crosses, so all that is owed arrives, and nothing waits any more."""
    after = {**state, RESIDUAL: nothing_owed(parcel.values)} if RESIDUAL in state else state
    return parcel.answered(owed(parcel, state).to(parcel.values.dtype), parcel.tail), after


def kept_back(parcel: Parcel, lost: Tensor) -> Tensor:
    """The next residual: what was owed and not sent; zeros between tensors, whatever was sent for them. In place."""
    residual = without_gaps(lost, gaps_of(parcel.layout)).nan_to_num_(0.0, 0.0, 0.0)
    return residual if parcel.scale == 1 else residual / parcel.scale


def was_owed(pushed: CompletedPush) -> int:
    """1 where an earlier push had left something out, which this one sent."""
    return int(pushed.workers > 1 and bool(pushed.before[RESIDUAL].any()))
