"""What one worker is expected to send, hold and spend in one step: of a group, of a stage, or in all."""

from dataclasses import dataclass

__all__ = ["Forecast"]


@dataclass(frozen=True)
class Forecast:
    """
    Args of note:
        sent_bytes: mean over workers.
        memory_bytes: of the fullest worker, between steps (weights, gradients, optimizer state).
        seconds: requests, index work and the optimizer's pass, none of it hidden behind anything.
        peak_bytes: what the fullest moment of a step adds to memory_bytes, such as activations and temporaries.
        moved_bytes: to slower memory and back, such as activations that are swapped to the host.
    """

    sent_bytes: float = 0.0
    memory_bytes: float = 0.0
    seconds: float = 0.0
    peak_bytes: float = 0.0
    moved_bytes: float = 0.0

    def __add__(self, other: "Forecast") -> "Forecast":
        return Forecast(
            self.sent_bytes + other.sent_bytes,
            self.memory_bytes + other.memory_bytes,
            self.seconds + other.seconds,
            self.peak_bytes + other.peak_bytes,
            self.moved_bytes + other.moved_bytes,
        )
