"""What one stage of a model costs: seconds, bytes saved for backward, bytes of the moment; and what a tier carries.

A chain of these is all that the planner and the player of lanes know of a model. They are measured by
`measure_stages.py` and written down with the plan, so that a plan can be made again without the model.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["KEEP", "RECOMPUTE", "SWAP", "StageChain", "StageCost", "TierSpeed"]

KEEP, RECOMPUTE, SWAP = "keep", "recompute", "swap"


@dataclass(frozen=True)
class StageCost:
    """One stage, run alone on an input that was cut off.

    Args of note:
        input_bytes: of what the stage before hands over; it stays until the stage's backward has ended.
        saved_bytes: storages that autograd keeps besides, each once, without parameters, buffers, inputs and outputs.
        small_bytes: of those, storages too small to be worth a transfer; they stay under "swap".
        forward_extra_bytes: what forward holds at its fullest beside saved_bytes and its output.
        unsaved_forward_bytes: what forward holds at its fullest beside its output where nothing is saved.
        backward_extra_bytes: what backward holds at its fullest beside saved_bytes and the gradients of parameters.
        gradient_bytes: of the gradients of its parameters.
        only_keep: why it can only be kept; empty where it need not be.
        no_recompute: why its forward must not run a second time; empty where it may.
    """

    path: str
    forward_seconds: float
    backward_seconds: float
    input_bytes: int
    saved_bytes: int
    small_bytes: int = 0
    forward_extra_bytes: int = 0
    unsaved_forward_bytes: int = 0
    backward_extra_bytes: int = 0
    gradient_bytes: int = 0
    only_keep: str = ""
    no_recompute: str = ""

    @property
    def moved_bytes(self) -> int:
        """What "swap" takes away."""
        return self.saved_bytes - self.small_bytes


@dataclass(frozen=True)
class TierSpeed:
    """Slower memory. processor_seconds_per_byte: what a transfer takes from compute, 0 where a core is idle.
    is_direct: past the page cache."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    processor_seconds_per_byte: float = 0.0
    is_direct: bool = True


@dataclass(frozen=True)
class StageChain:
    """A model as a chain of stages.

    Args of note:
        outside: what runs outside every stage, such as the loss, as one more stage behind the last; it is always kept.
        fixed_bytes: weights, buffers and the optimizer's state, there all the time.
        keeps_gradients: the gradients of all parameters are there all the time, as with the buckets of DDP.
    """

    stages: tuple[StageCost, ...]
    outside: StageCost
    fixed_bytes: int = 0
    keeps_gradients: bool = False

    @property
    def compute_seconds(self) -> float:
        """Of one step that keeps everything."""
        return sum(one.forward_seconds + one.backward_seconds for one in (*self.stages, self.outside))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "StageChain":
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "StageChain":
        stages = tuple(StageCost(**one) for one in found["stages"])
        return cls(stages, StageCost(**found["outside"]), found["fixed_bytes"], found["keeps_gradients"])
