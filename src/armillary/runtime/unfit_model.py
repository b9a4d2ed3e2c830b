"""What speaks against a model as it is handed in, whatever the plan: wrapped, compiled, or at work in another run.

A wrapper exchanges gradients itself, or keeps weights elsewhere; it would wait for ranks that do not come, or train
twice on what another exchange has touched. Wrappers are known by the names of their classes, so that none is imported.
"""

import weakref
from collections.abc import Iterator

from torch import nn

from armillary.runtime.hybrid.handle import TableHandle

__all__ = ["AT_WORK", "unfit_model"]

AT_WORK: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules with parameters that an open run trains

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
