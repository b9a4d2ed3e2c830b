"""Whether a model makes collectives of its own in its forward (batch statistics over ranks, say).

Such a model must make as many forwards on every rank: where one rank looked at it alone, it would wait for ever.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.facts.untouched import untouched
from armillary.runtime.profiling.probe import Loss
from armillary.runtime.transport import Transport

__all__ = ["makes_collectives"]


def makes_collectives(model: nn.Module, draw: Callable[[], Any], loss: Loss, transport: Transport) -> bool:
    """Collective: every rank makes one forward of a batch of its own, and leaves the model as it was. True if any rank
    saw a collective. An error is left to the profile to tell.

    Args:
        draw: gives a batch of this rank.
    """
    watch = _Collectives()
    with suppress(Exception):
        batch = draw()
        with untouched(model), torch.no_grad(), watch:
            loss(model, batch)
    return any(transport.share(watch.is_seen))


class _Collectives(TorchDispatchMode):
    """While active, notes whether a collective was asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_seen = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.is_seen |= func.namespace.startswith(("c10d", "_c10d"))
        return func(*args, **(kwargs or {}))
