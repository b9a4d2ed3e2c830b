"""What a model must be to be solved as equations: a function, and causal. Tried on a probe, refused by name."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["is_close", "refuse_non_causal", "refuse_train_mode"]

RESTLESS = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
CUTS = 32  # places where the past is held and the future changed


def refuse_train_mode(model: object, call: str) -> None:
    """A BatchNorm in train mode makes samples hear each other, a dropout draws anew in every pass."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if module.training and isinstance(module, RESTLESS):
            kind = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            raise ValueError(f"{call}: {kind} is in train mode, so one pass is not like the next; call eval() first")


def refuse_non_causal(net: Callable[[Tensor], Tensor], one: Tensor, other: Tensor) -> None:
    """Changes all inputs from t on, for many t at once: outputs up to t must stay as they were.

    Args:
        one, other: (T,) two fills of the inputs that differ wherever they may.
    """
    unknowns = len(one)
    draw = torch.Generator().manual_seed(0)
    some = torch.randperm(unknowns, generator=draw)[:CUTS].tolist()
    cuts = sorted({*range(min(2, unknowns)), *range(unknowns - 1, unknowns), *some})
    rows = torch.stack([one, one, *(torch.cat([one[:t], other[t:]]) for t in cuts)])
    outputs = net(rows)
    if outputs.shape[:2] != rows.shape:
        raise ValueError(
            f"sample: net gives {tuple(outputs.shape)} for inputs of {tuple(rows.shape)}; want (samples, unknowns, ...)"
        )
    if not is_close(outputs[0], outputs[1]):
        raise ValueError("sample: net gives two equal inputs different outputs; take what it draws out, or call eval()")
    for row, t in enumerate(cuts, start=2):
        if not is_close(outputs[row, : t + 1], outputs[0, : t + 1]):
            raise ValueError(
                f"sample: net is not causal: inputs from {t} on change an output at {t} or before; mask them"
            )


def is_close(one: Tensor, other: Tensor) -> bool:
    """Up to what kernels round otherwise for another shape."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    slack = torch.finfo(one.dtype).eps ** 0.6
    return torch.allclose(one, other, rtol=slack, atol=slack, equal_nan=True)
