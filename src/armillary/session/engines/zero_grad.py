"""An optimizer's `zero_grad` that is heard of: torch has no hook for it.

Gradients of spread rows that accumulate lie in look-ups, where no optimizer sees them.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

__all__ = ["Heard", "tell_of_zero_grad"]


@dataclass(frozen=True)
class Heard:
    """`remove`: the optimizer has its own method again."""

    optimizer: weakref.ref[Optimizer]
    ours: Any
    before: dict[str, Any]

    def remove(self) -> None:
        optimizer = self.optimizer()
        if optimizer is not None and vars(optimizer).get("zero_grad") is self.ours:  # else somebody wrapped it since
            del optimizer.zero_grad
            vars(optimizer).update(self.before)


def tell_of_zero_grad(optimizer: Optimizer, told: Callable[[Optimizer], None]) -> Heard:
    """Until it is removed, calls told(optimizer), a bound method, after each `zero_grad`. Whom it tells is known
    weakly: the optimizer is the user's."""
    known, listener = weakref.ref(optimizer), weakref.WeakMethod(told)
    before = {name: value for name, value in vars(optimizer).items() if name == "zero_grad"}

    def zero_grad(set_to_none: bool = True) -> None:
        one, heard = known(), listener()
        assert one is not None
        plain = before.get("zero_grad") or type(one).zero_grad.__get__(one)
        plain(set_to_none)
        if heard is not None:
            heard(one)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return Heard(known, zero_grad, before)
