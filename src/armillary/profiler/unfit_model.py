"""What speaks against a model as it is handed in, whatever the plan: wrapped, compiled, or at work in another run.

A wrapper exchanges gradients itself, or keeps weights elsewhere. It would wait for ranks that do not come, or train
twice on what another exchange has touched. Wrappers are known by the names of their classes, so that none is imported.

A model that makes collectives in its forward (batch statistics over ranks, say) must make as many forwards on every
rank, or one would wait for ever (`makes_collectives`).
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.models.preserved_state import untouched
from armillary.profiler.probe import Loss
from armillary.tables.handle import TableHandle
from armillary.transport.transport import Transport

__all__ = ["AT_WORK", "at_rest", "makes_collectives", "refusing_collectives", "unfit_model"]


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


def refusing_collectives() -> TorchDispatchMode:
    """While active, a collective of the model's own raises: one rank looks alone, and would wait for the others."""
    return _Collectives(is_refused=True)


class _Collectives(TorchDispatchMode):
    """While active, notes whether a collective was asked for, or refuses it."""

    def __init__(self, is_refused: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_seen, self.is_refused = False, is_refused

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_collective = func.namespace.startswith(("c10d", "_c10d"))
        if is_collective and self.is_refused:
            raise RuntimeError(f"{func} is a collective, and only one rank looks at the model here")
        self.is_seen |= is_collective
        return func(*args, **(kwargs or {}))


AT_WORK: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules with parameters that an open run trains


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Inside, it may be looked at though an open run trains it, of which nothing hangs on its parameters now."""
    working = [module for module in model.modules() if module in AT_WORK]
    AT_WORK.difference_update(working)
    try:
        yield
    finally:
        AT_WORK.update(working)


WRAPPERS = {
    "DistributedDataParallel": "is wrapped in DistributedDataParallel, which exchanges gradients itself; hand in the "
    "model inside it: model.module, and make the optimizer over the same model",
    "DataParallel": "is wrapped in DataParallel, which cuts batches itself; hand in the model inside it: model.module, "
    "and start a process for each device",
    "FullyShardedDataParallel": "is wrapped in FullyShardedDataParallel, which keeps its weights elsewhere; hand in "
    "the plain model, whose plan may spread weights itself",
    "FSDPModule": "went through fully_shard, which keeps its weights elsewhere; hand in the plain model, whose plan "
    "may spread weights itself",
}


def unfit_model(model: nn.Module) -> str:
    """The first thing that speaks against it, with its remedy; empty if there is none."""
    return next(_complaints(model), "")


def _complaints(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        it = f"module {path!r}" if path else "the model"
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
                yield f"{it} {WRAPPERS[kind.__name__]}"
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            yield f"{it} is compiled, which hides its reads; hand in the plain model first, then compile it"
        if module in AT_WORK:
            yield (
                f"{it} already has a plan, which an open run carries out; close that run first (run.close()), or build "
                "the model anew"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, TableHandle):
            yield (
                f"{name} was spread over the workers by a run that ended without gathering it; build the model anew, "
                "and load an export or a checkpoint"
            )
        elif hasattr(parameter, "_in_backward_optimizers"):
            yield (
                f"{name} is stepped inside backward (by _apply_optimizer_in_backward), before its gradient could be "
                "exchanged; build the model anew without that, and hand in its optimizer"
            )
        elif hasattr(parameter, "__tensor_flatten__"):
            yield f"{name} is a {type(parameter).__name__}; hand in the model before it is distributed"
