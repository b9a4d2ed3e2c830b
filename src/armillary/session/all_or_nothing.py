"""A change to a model and its optimizer that is made whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.hybrid.identity import become

__all__ = ["all_or_nothing"]


@contextmanager
def all_or_nothing(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """After an error inside, parameters are what they were, and the optimizer holds them and the state that it held.
    Values that were written to in place stay written."""
    plain = [parameter for parameter in model.parameters() if not isinstance(parameter, TableHandle)]
    held = [(parameter, parameter.data, parameter.requires_grad) for parameter in plain]
    groups = [(group, list(group["params"])) for group in optimizer.param_groups]
    state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    try:
        yield
    except BaseException:
        for parameter, values, requires_grad in held:
            if isinstance(parameter, TableHandle):
                become(parameter, nn.Parameter(values, requires_grad))
        for group, params in groups:
            group["params"][:] = params
        optimizer.state.clear()
        optimizer.state.update(state)
        raise
