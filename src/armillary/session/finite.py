"""Whether gradients are finite: each rank looks at its own before they leave, and all hear of it when they have landed.

After an exchange every rank holds a value that is not a number, the weights of all follow, and nobody can say any more
whose it was. Costs one look at every gradient and one request of 8 bytes a backward.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from armillary.facts.collectives import summed
from armillary.runtime.transport import Transport

__all__ = ["FiniteCheck"]

MOST_NAMES = 3  # in an error


class FiniteCheck:
    """`look` asks nobody; `compare` asks all ranks."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._sick: list[str] = []

    def look(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """At gradients of this rank alone, with the names of their parameters."""
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None and not bool(gradient.isfinite().all()):
                self._sick.append(name)

    def compare(self) -> None:
        """Collective, at the end of a backward.

        Raises:
            FloatingPointError: some rank's gradient is not finite. On every rank; nothing was stepped.
        """
        sick, self._sick = list(dict.fromkeys(self._sick)), []
        if not self.transport.complete(summed(torch.tensor([float(len(sick))], dtype=torch.float64)), "finite"):
            return
        everyones = self.transport.share(sick)
        told = "; ".join(f"rank {rank}: {_listed(names)}" for rank, names in enumerate(everyones) if names)
        raise FloatingPointError(
            f"check_finite: in step {self.transport.step + 1} gradients are not finite ({told}), and no rank stepped; "
            "look at that rank's batch and loss, or leave the step out on every rank: optimizer.zero_grad()"
        )

    def and_then(self, compare: Callable[[], None]) -> Callable[[], None]:
        """Both comparisons, one after the other."""

        def both() -> None:
            self.compare()
            compare()

        return both


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
