"""How fast a rank's own processor and memory work on rows and tensors: what an exchange costs beside its messages.

Owned rows are gathered, merged and added on somebody's processor. The rates are measured once per device, with all
ranks at work at once, because ranks that share cores share them in training too.
"""

from dataclasses import asdict, dataclass

__all__ = ["CodingRate", "Processor", "RowRate", "UpdateRate"]


@dataclass(frozen=True)
class RowRate:
    """One kind of index work: seconds = call_seconds + rows * (row_seconds + bytes of a row * byte_seconds).

    residual: largest relative error of that line over the times it was fitted to.
    """

    call_seconds: float
    row_seconds: float
    byte_seconds: float
    residual: float = 0.0

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in asdict(self).items() if not value >= 0}
        if wrong:
            raise ValueError(f"topology: rates of index work must not be negative, got {wrong}")

    def seconds(self, rows: float, row_bytes: float) -> float:
        return self.call_seconds + rows * (self.row_seconds + row_bytes * self.byte_seconds)


@dataclass(frozen=True)
class CodingRate:
    """What a push of an exchange that is not exact takes of a rank's processor among so many workers, links apart:
    seconds = call_seconds + million_seconds for every million float32 values.

    exchange: with its options, as it prints.
    """

    exchange: str
    workers: int
    call_seconds: float
    million_seconds: float
    residual: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 2 or not (self.call_seconds >= 0 and self.million_seconds >= 0):
            raise ValueError(f"topology: want a coding rate of 2 workers or more, no time below zero, got {self}")


@dataclass(frozen=True)
class UpdateRate:
    """An optimizer's step: seconds = tensors * tensor_seconds + bytes of their weights * byte_seconds."""

    tensor_seconds: float
    byte_seconds: float

    def __post_init__(self) -> None:
        if not (self.tensor_seconds >= 0 and self.byte_seconds >= 0):
            raise ValueError(f"topology: rates of an optimizer's step must not be negative, got {self}")


@dataclass(frozen=True)
class Processor:
    """gather: rows out of a table. merge: equal rows found and added up. add: rows added into a table.

    memory_bytes_per_second: at which whole tensors are read and written, both counted. coding: of the exchanges that
    are not exact, where they were timed. updates: of optimizers, by how many tensors of state they keep for each of
    the model's: SGD, momentum, Adam. landing_seconds: of one gradient, however small, that a schedule collects.
    """

    gather: RowRate
    merge: RowRate
    add: RowRate
    memory_bytes_per_second: float
    coding: tuple[CodingRate, ...] = ()
    updates: tuple[UpdateRate, ...] = ()
    landing_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.memory_bytes_per_second > 0:
            raise ValueError(f"topology: want memory_bytes_per_second > 0, got {self.memory_bytes_per_second}")
        if not self.landing_seconds >= 0:
            raise ValueError(f"topology: want landing_seconds >= 0, got {self.landing_seconds}")

    @property
    def kinds(self) -> tuple[RowRate, ...]:
        """Of index work."""
        return self.gather, self.merge, self.add
