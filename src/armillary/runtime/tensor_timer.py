"""Times what a tensor costs however small it is: in an optimizer's step, and as a gradient that a schedule collects.

A stage of a transformer has dozens of parameters of a few kilobytes. What their bytes take at the speed of memory was a
third of the optimizer's step; the rest were calls, 40 of them a tensor with Adam.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.facts.processor import UpdateRate
from armillary.runtime.index_timer import Timer
from armillary.runtime.line import fit

__all__ = ["landing_seconds", "update_rates"]

TENSORS = 32
SMALL, LARGE = 16, 1 << 14  # elements: all of the large ones, with gradients and state, are more than a cache holds
ITEM_BYTES = 4


def update_rates(timer: Timer) -> tuple[UpdateRate, ...]:
    """Of SGD, with momentum, of Adam: by how many tensors of state they keep. Every rank gets the same."""

    def step(make: Callable[[list[nn.Parameter]], Optimizer], elements: int) -> float:
        return timer.seconds(make(_learnt(timer, elements)).step) / TENSORS

    makes: tuple[Callable[[list[nn.Parameter]], Optimizer], ...] = (
        partial(torch.optim.SGD, lr=0.0),
        partial(torch.optim.SGD, lr=0.0, momentum=0.9),
        partial(torch.optim.Adam, lr=0.0),
    )
    found = timer.agree([step(make, elements) for make in makes for elements in (SMALL, LARGE)])
    sizes = [(1.0, float(elements * ITEM_BYTES)) for elements in (SMALL, LARGE)]
    return tuple(UpdateRate(*fit(sizes, found[first : first + 2]).costs) for first in range(0, len(found), 2))


def landing_seconds(timer: Timer) -> float:
    """Of one gradient that is added to a sum as soon as backward has made it (`runtime/cyclic/stage_pass.py`), beyond
    one that is left where it is."""
    leaves = _learnt(timer, SMALL)
    sums = {id(leaf): torch.zeros_like(leaf) for leaf in leaves}
    out = torch.stack([leaf.sum() for leaf in leaves]).sum()

    def back() -> None:
        torch.autograd.backward(out, inputs=leaves, retain_graph=True)

    def left() -> None:
        back()
        for leaf in leaves:
            leaf.grad = None

    def add(leaf: Tensor) -> None:
        if leaf.grad is not None:
            sums[id(leaf)].add_(leaf.grad)
            leaf.grad = None

    def landed() -> None:
        hooks = [leaf.register_post_accumulate_grad_hook(add) for leaf in leaves]
        back()
        for hook in hooks:
            hook.remove()

    return max(0.0, timer.seconds(landed) - timer.seconds(left)) / TENSORS


def _learnt(timer: Timer, elements: int) -> list[nn.Parameter]:
    """Parameters with gradients."""
    made = [nn.Parameter(torch.zeros(elements, device=timer.device)) for _ in range(TENSORS)]
    for one in made:
        one.grad = torch.zeros_like(one)
    return made
