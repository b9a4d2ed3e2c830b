"""A cut model beside the model as the user wrote it: loss, every gradient, and the bytes that were sent.

The truth is the plain model in one process: `loss(model, batch)` in a loop over the replicas' batches, in double
precision and in eval mode. It shares nothing with the cut.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from armillary.tensor.cut import cut, examined
from armillary.tensor.dry_run import dry_run, fake_calls
from armillary.tensor.groups import by_rank_0, is_rank_0, shared
from armillary.tensor.mesh_plan import MeshPlan

__all__ = ["CutVerdict", "verify"]

EXACT = 1e-10


@dataclass(frozen=True)
class CutVerdict:
    """Largest differences, relative to the largest value of a tensor. where: the parameter that differs most.

    Args of note:
        gradients: how many were judged; none is no verdict. sent_bytes, forecast_bytes: of a rank's forward and
            backward, in double precision.
    """

    loss: float
    gradient: float
    where: str
    gradients: int
    sent_bytes: float
    forecast_bytes: float

    @property
    def is_equal(self) -> bool:
        return self.gradients > 0 and max(self.loss, self.gradient) <= EXACT

    def __str__(self) -> str:
        judged = "equal" if self.is_equal else "NOT equal" if self.gradients else "nothing judged"
        return "\n".join(
            [
                "| judged | largest difference |",
                "| --- | --- |",
                f"| loss | {self.loss:.1e} |",
                f"| gradients of {self.gradients} parameters, {self.where} | {self.gradient:.1e} |",
                "",
                f"Bytes sent by a rank: {self.sent_bytes:.0f}, forecast {self.forecast_bytes:.0f}.",
                f"{judged} (at most {EXACT:.0e})",
            ]
        )


def verify(
    model: nn.Module, batches: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor], plan: MeshPlan
) -> CutVerdict:
    """Cuts a copy in double precision, as the plan says, and makes one step of it and of the plain model. Every rank
    calls it with the same model and batches, and gets the same verdict; the model stays as it was.

    Args:
        batches: one for each replica of the plan, as that replica is given it.

    Raises:
        ValueError: fewer batches than replicas, or the model cannot be cut so.
    """
    replicas = plan.mesh["data"]
    if len(batches) < replicas:
        raise ValueError(f"tensor.verify: want {replicas} batches, one for each replica, got {len(batches)}")
    doubles = [_in_double(one) for one in batches[:replicas]]
    truth = copy.deepcopy(model).double().eval()
    true_losses = [loss(truth, one) for one in doubles]
    torch.stack(true_losses).mean().backward()
    copied = copy.deepcopy(model).double().eval()
    forecast = by_rank_0(lambda: _forecast_bytes(copied, doubles[0], loss, plan))
    part = cut(copied, plan)
    before = part.sent_bytes
    mine = loss(part.model, doubles[part.data_rank])
    mine.backward()
    sent = part.sent_bytes - before
    gradients = part.whole_gradients()
    loss_apart = _apart(mine.detach().cpu(), true_losses[part.data_rank].detach())
    part.close()
    true_gradients = {name: one.grad for name, one in truth.named_parameters() if one.grad is not None}
    apart = {name: _apart(gradients.get(name), one) for name, one in true_gradients.items()}
    apart |= {name: float("inf") for name in gradients.keys() - true_gradients.keys()}
    where = max(apart, key=lambda name: apart[name], default="none")
    told = shared(CutVerdict(loss_apart, apart.get(where, 0.0), where, len(apart), sent, forecast))
    worst: CutVerdict = max(told, key=lambda one: max(one.loss, one.gradient))
    if is_rank_0():
        print(worst)
    return worst


def _forecast_bytes(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor], plan: MeshPlan) -> float:
    chain = examined(model, plan.region, plan.way, plan.mesh, plan.roles).chain
    calls = fake_calls(model, chain, lambda: loss(model, batch))
    return dry_run(model, plan.region, plan.way, plan.mesh, plan.roles, calls).sent_bytes


def _in_double(batch: Any) -> Any:
    return tree_map_only(Tensor, lambda one: one.double() if one.is_floating_point() else one, batch)


def _apart(found: Tensor | None, true: Tensor) -> float:
    if found is None:
        return float("inf")
    apart = float((found - true.cpu()).abs().max() / true.abs().max().clamp_min(1e-300))
    return apart if math.isfinite(apart) else math.inf  # else a comparison with NaN would call it equal
