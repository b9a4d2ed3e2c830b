"""How far a run may lie from its forecast and still be as it was foreseen."""

from dataclasses import asdict, dataclass

from armillary.plans.group import Forecast

__all__ = ["Band"]

# Of what the band leaves to the whole step: as much of it may a group use up that is out by more than its own band.
# With the default bands: 0.1 % of the step's bytes, which are counted, and 1 % of its memory and of its seconds.
SMALL_PARTS = {"sent_bytes": 1 / 20, "memory_bytes": 1 / 10, "seconds": 1 / 15}


@dataclass(frozen=True)
class Band:
    """Largest difference between forecast and measured, as a share of the larger of the two.

    decided_bytes: instead of sent_bytes, where the data decide how much is sent.
    """

    sent_bytes: float = 0.02
    memory_bytes: float = 0.10
    seconds: float = 0.15
    decided_bytes: float = 0.30

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in asdict(self).items() if not 0 <= value <= 1}
        if wrong:
            raise ValueError(f"compare: a band is a share between 0 and 1, got {wrong}")

    @property
    def small(self) -> Forecast:
        """Shares of the whole step: differences of a group below them are let pass."""
        return Forecast(**{name: part * getattr(self, name) for name, part in SMALL_PARTS.items()})
