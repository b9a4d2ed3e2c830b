"""A region cut and run without values and without sending: what a mesh asks of its axes, and the bytes that it holds.

Tensors are torch's fake ones, which have shapes and storages but no memory. So a mesh is priced by the very code that
will run on it. The rank looked at is the first one; pieces are padded, so all are as long.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from armillary.models.preserved_state import LiveBytes, untouched
from armillary.tensor.cut import carry_out, examined
from armillary.tensor.groups import MeshAxis, dry_mesh
from armillary.tensor.inventory import Call, calls_of

__all__ = ["DryRun", "FakeCalls", "dry_run", "fake_calls"]


@dataclass(frozen=True)
class FakeCalls:
    """What the modules of a region are called with, without values."""

    fake: FakeTensorMode
    calls: Sequence[Call]


@dataclass(frozen=True)
class DryRun:
    """One forward and backward of a region.

    Args of note:
        axes: what was asked of each. numbers: of the parameters that a rank holds.
        peak_bytes: the most there were of tensors, beside parameters and their gradients.
    """

    axes: tuple[MeshAxis, ...]
    numbers: int
    peak_bytes: int

    @property
    def sent_bytes(self) -> float:
        return sum(axis.sent_bytes for axis in self.axes)


def fake_calls(model: nn.Module, chain: Mapping[str, nn.Module], forward: Callable[[], Any]) -> FakeCalls:
    """Of a forward of the plain model on the samples of one replica; nothing is kept of it."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with untouched(model), torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x):
        return FakeCalls(fake, calls_of(chain, forward, fake.from_tensor))


def dry_run(
    model: nn.Module, region: str, way: str, sizes: Mapping[str, int], roles: Mapping[str, str], given: FakeCalls
) -> DryRun:
    """
    Args:
        model: plain; it stays as it is.

    Raises:
        ValueError: the region cannot be cut so, or not run with so few samples or tokens. RuntimeError: its code does
            not fit the cut, or decides by values.
    """
    held = {id(one): one for one in (*model.parameters(), *model.buffers())}
    memo = {key: _faked(one, given.fake) for key, one in held.items()}
    copied = copy.deepcopy(model, memo)
    found, mesh = examined(copied, region, way, sizes, roles), dry_mesh(sizes)
    carry_out(copied, found, way, mesh)
    parameters = [one for module in found.chain.values() for one in module.parameters()]
    for one in parameters:
        if one.requires_grad:
            one.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    live = LiveBytes()
    with given.fake, live:
        live.mark()
        _played(found.chain, given.calls)
    numbers = sum(one.numel() for one in {id(one): one for one in parameters}.values())
    return DryRun(tuple(mesh.axes.values()), numbers, live.added_bytes)


def _played(chain: Mapping[str, nn.Module], calls: Sequence[Call]) -> None:
    """Forward and backward, each module on what the one before gave, which is held as long as it is needed."""
    x = torch.empty_like(calls[0].activation) + torch.zeros((), requires_grad=True)  # no leaf, which would stay
    for module, call in zip(chain.values(), calls, strict=True):
        x = module(x, *call.others, **call.named)
        x = x[0] if isinstance(x, tuple) else x
    x = x.sum()
    x.backward()


def _faked(one: Tensor, fake: FakeTensorMode) -> Tensor:
    found = fake.from_tensor(one.detach())
    return nn.Parameter(found, one.requires_grad) if isinstance(one, nn.Parameter) else found
