"""The name under which torch.profiler shows a request; it costs nothing where no profiler is on."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["named"]


def named(what: str) -> AbstractContextManager[Any]:
    """Around what a profiler is to show."""
    is_watched = torch._C._autograd._profiler_enabled()
    return torch.profiler.record_function(f"armillary::{what}") if is_watched else nullcontext()
