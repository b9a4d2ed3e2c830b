"""One stage of a model: what its forward and backward pass cost a worker.

Schedules place stages, and memory is priced by the activations a stage keeps, so costs are counted by stage.
"""

from dataclasses import asdict, dataclass
from typing import NamedTuple

__all__ = ["Numbers", "StageFact"]


class Numbers(NamedTuple):
    """Of one tensor: how many, and bytes of each."""

    numel: int
    item_bytes: int


@dataclass(frozen=True)
class StageFact:
    """One part of the model, per worker and step. "" is what runs outside every stage (the loss, the glue).

    Args of note:
        forward_flops: multiply and add counted as two; matrix products, convolutions, attention only.
        activation_bytes: storages kept for the backward pass, each once, parameters and buffers left out.
        forward_seconds, backward_seconds: on the machine that made the profile, without exchange.
        output_bytes: of what the stage's last call returned: what crosses to another device if the model is cut there.
        output_numbers: of those tensors among them that have floating numbers of two dimensions or more.
    """

    name: str
    forward_flops: int
    parameter_bytes: int
    activation_bytes: int
    forward_seconds: float
    backward_seconds: float
    output_bytes: int = 0
    output_numbers: tuple[Numbers, ...] = ()

    def __post_init__(self) -> None:
        negative = [
            name for name, value in asdict(self).items() if name not in ("name", "output_numbers") and value < 0
        ]
        if negative:
            raise ValueError(f"profile: stage {self.name!r} has negative {', '.join(negative)}")
