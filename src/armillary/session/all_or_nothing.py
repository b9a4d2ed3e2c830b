"""A change to a model and its optimizer that is made whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

__all__ = ["all_or_nothing"]


@contextmanager
def all_or_nothing(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """After an error inside, modules and optimizer hold the parameters and the state that they held before. Values that
    were written to in place stay written."""
    held = [(module, dict(module._parameters)) for module in model.modules()]
    groups = [(group, list(group["params"])) for group in optimizer.param_groups]
    state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    try:
        yield
    except BaseException:
        for module, parameters in held:
            module._parameters.clear()
            module._parameters.update(parameters)
        for group, params in groups:
            group["params"] = params
        optimizer.state.clear()
        optimizer.state.update(state)
        raise
