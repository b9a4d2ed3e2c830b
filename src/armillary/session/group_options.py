"""Options of an optimizer's groups (learning rate, weight decay): what a run began with, and what is asked anew."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from armillary.runtime.checkpointing.optimizer_state import plain
from armillary.runtime.cyclic.delayed_step import Options, options_of

__all__ = ["ask_anew", "group_options"]


def group_options(optimizer: Optimizer) -> Options:
    """As they are now, fit for a checkpoint."""
    return [{name: plain(value) for name, value in group.items()} for group in options_of(optimizer)]


def ask_anew(optimizer: Optimizer, begun: Sequence[Mapping[str, Any]], asked: Sequence[Mapping[str, Any]]) -> str:
    """Puts what is asked otherwise than the run began with in the place of what was loaded; says what. A number that a
    scheduler has moved since then is moved in proportion."""
    said: dict[str, None] = {}
    for group, was, wanted in zip(optimizer.param_groups, begun, asked, strict=True):
        for name, value in wanted.items():
            if name not in was or value == was[name]:
                continue
            loaded = group[name]
            is_moved = isinstance(loaded, float) and bool(was[name]) and loaded != was[name]
            group[name] = value * loaded / was[name] if is_moved else value
            said[f"{name} is {_text(group[name])} as asked now, no longer {_text(loaded)}"] = None
    return ", ".join(said)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
