"""A table that is still whole, behind a handle that can only be read by row.

Stands in for the rows of owners before there are any, while a step is timed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.runtime.hybrid.handle import TableHandle

__all__ = ["handle_of_whole"]


def handle_of_whole(name: str, whole: Tensor) -> TableHandle:
    """The rows of a look-up, each id's its own, learn; the table does not."""
    return TableHandle(_WholeTable(name, whole, whole.shape), whole, whole.requires_grad)


@dataclass(eq=False)
class _WholeTable:
    """Equal ids are not merged: that is index work, which is priced apart."""

    name: str
    whole: Tensor
    shape: torch.Size
    gradient: Tensor | None = None
    epoch: int = 0
    accumulates: bool = False

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.whole.detach().index_select(0, ids.reshape(-1).long())
        learns = torch.is_grad_enabled() and self.whole.requires_grad
        return rows.requires_grad_(learns), torch.arange(ids.numel(), device=ids.device).view(ids.shape)

    @property
    def rows(self) -> Tensor:
        return self.whole.detach()

    def everyones(self, part: Tensor) -> Tensor:
        return part.unsqueeze(0)

    def load(self, whole: Tensor) -> None:
        raise AssertionError(f"{self.name}: written to while it is only watched")

    def gradient_norms(self, order: float) -> Tensor:
        raise AssertionError(f"{self.name} has no gradient")

    def drop_gradient(self) -> None:
        """It has none."""

    def drop_accumulated(self) -> None:
        """It has none."""
