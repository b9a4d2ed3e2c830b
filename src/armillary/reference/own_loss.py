"""A stage that learns from a loss of its own, at weights of a given version: its output, and that loss.

The loss may have weights in the stage, those of a head. So both are made in one call, which reads the same version.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["with_own_loss"]

Learns = Callable[[nn.Module, Any], Tensor]


def with_own_loss(stage: nn.Module, tensors: Mapping[str, Tensor], value: Any, learns: Learns) -> tuple[Any, Tensor]:
    """
    Args:
        tensors: parameters and buffers, by the stage's own names.
        learns: (stage, output) -> scalar.
    """
    named = {f"stage.{name}": tensor for name, tensor in tensors.items()}
    found: tuple[Any, Tensor] = functional_call(_Learning(stage, learns), named, (value,))
    return found


class _Learning(nn.Module):
    def __init__(self, stage: nn.Module, learns: Learns) -> None:
        super().__init__()
        self.stage, self.learns = stage, learns

    def forward(self, value: Any) -> tuple[Any, Tensor]:
        output = self.stage(value)
        return output, self.learns(self.stage, output)
