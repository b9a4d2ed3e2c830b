"""What the optimizer of a parameter keeps of it, and what its step does to it."""

from dataclasses import dataclass

__all__ = ["Upkeep"]


@dataclass(frozen=True)
class Upkeep:
    """As `Assumptions` has it for parameters that no entry names. The default is Adam's."""

    optimizer_slots: int = 2
    moves_quiet_rows: bool = True
    step_slots: float = 0.0
    mixes_rows: str = ""
    lists_rows: bool = False
    stays_whole: str = ""

    def __post_init__(self) -> None:
        if min(self.optimizer_slots, self.step_slots) < 0:
            raise ValueError(
                f"pricing: of a parameter want optimizer_slots and step_slots >= 0, got {self.optimizer_slots} and "
                f"{self.step_slots}"
            )
