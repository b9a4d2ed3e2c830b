"""A GradScaler whose ranks agree: every rank skips a step that any rank's gradients (or owned rows) made non-finite."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from armillary.runtime.transport import Transport

__all__ = ["agree_on_found_inf"]


def agree_on_found_inf(scaler: Any, transport: Transport, serve: Callable[[], None]) -> Callable[[], None]:
    """Replaces the method by which a scaler looks at gradients. Returns what puts the scaler's own back.

    Args:
        serve: looks rows up for ranks that read on their own, until all are here.
    """
    unscale = scaler._unscale_grads_

    def unscale_alike(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = unscale(*args, **kwargs)
        with transport.within("unscaling of gradients"):
            serve()
            largest = transport.agree_largest([max((float(value) for value in found.values()), default=0.0)])
        for value in found.values():
            value.fill_(largest[0])
        return found

    def restore() -> None:
        vars(scaler).pop("_unscale_grads_", None)

    scaler._unscale_grads_ = unscale_alike
    return restore
