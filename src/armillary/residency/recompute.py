"""A stage whose forward runs a second time in backward: torch's checkpoint, with its buffers put back afterwards.

Checkpoint restores random state and autocast, but not buffers: BatchNorm's statistics would move twice. It leaves its
second run early by an exception, so they are put back in a `finally`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["run_again_in_backward", "warm_up"]


def run_again_in_backward(stage: nn.Module) -> Callable[[], None]:
    """From now on the stage keeps only its input between forward and backward. Returns what undoes it."""
    plain, had_own = stage.forward, "forward" in vars(stage)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=lambda: _contexts(stage), **kwargs)

    stage.forward = forward

    def undo() -> None:
        if had_own:
            stage.forward = plain
        else:
            del stage.forward

    return undo


def warm_up() -> None:
    """The first call of checkpoint imports torch._dynamo, which takes seconds that belong to no step."""
    checkpoint(torch.sin, torch.zeros(1, requires_grad=True), use_reentrant=False).backward()


def _contexts(stage: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first run and around the second."""
    return nullcontext(), _buffers_put_back(stage)


@contextmanager
def _buffers_put_back(stage: nn.Module) -> Iterator[None]:
    before = [buffer.clone() for buffer in stage.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, found in zip(stage.buffers(), before, strict=True):
                buffer.copy_(found)
