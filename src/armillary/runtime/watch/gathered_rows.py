"""Tables whose look-ups end at the rows they bring, as when owners hold them: for a step by the clock.

The gradient of a whole table costs a pass over all of it, and fresh memory of its size: of two tables of 400 MB ten
times the rest of the step. Only plans that keep such a table whole pay that (`planning/pricing.py`), so a stage's time
is without.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from armillary.runtime.hybrid.handle import TableHandle

__all__ = ["gathering"]


@contextmanager
def gathering(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Inside, these parameters, read by row alone, learn nothing: the rows of each look-up do, each id's its own."""
    tables = {parameter: name for name, parameter in model.named_parameters() if name in names}
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    handles = {
        table: TableHandle(_Rows(name, table, table.shape), table, table.requires_grad)
        for table, name in tables.items()
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in handles:
                swapped.append((module, name, parameter))
    try:
        for module, name, parameter in swapped:
            module._parameters[name] = handles[parameter]  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter


@dataclass(eq=False)
class _Rows:
    """A table that is whole. Equal ids are not merged: that is index work, which is priced apart."""

    name: str
    whole: Tensor
    shape: torch.Size
    gradient: Tensor | None = None
    epoch: int = 0

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.whole.detach().index_select(0, ids.reshape(-1).long())
        learns = torch.is_grad_enabled() and self.whole.requires_grad
        return rows.requires_grad_(learns), torch.arange(ids.numel(), device=ids.device).view(ids.shape)

    def load(self, whole: Tensor) -> None:
        raise AssertionError(f"{self.name}: a step by the clock wrote to it")

    def gradient_norms(self, order: float) -> Tensor:
        raise AssertionError(f"{self.name} has no gradient")

    def drop_gradient(self) -> None:
        """It has none."""

    def join(self) -> None:
        """Nothing is deferred."""
