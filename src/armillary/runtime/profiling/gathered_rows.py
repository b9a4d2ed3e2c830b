"""Tables whose look-ups end at the rows they bring, as when owners hold them: for a step by the clock.

The gradient of a whole table costs a pass over all of it, and fresh memory of its size: of two tables of 400 MB ten
times the rest of the step. Only plans that keep such a table whole pay that (`planning/pricing.py`), so a stage's time
is without.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

from armillary.runtime.profiling.whole_table import handle_of_whole

__all__ = ["gathering"]


@contextmanager
def gathering(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Inside, these parameters, read by row alone, learn nothing: the rows of each look-up do, each id's its own."""
    tables = {parameter: name for name, parameter in model.named_parameters() if name in names}
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    handles = {table: handle_of_whole(name, table) for table, name in tables.items()}
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
