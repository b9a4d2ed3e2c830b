"""The arithmetic of the report: what runs of three seeds say together, and where a loss stands on an axis of time."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Spread", "gaps", "mean_curve", "reached", "seconds_by_mode", "spread", "trailing"]


@dataclass(frozen=True)
class Spread:
    """Of some seeds. `deviation` is that of the sample, 0 for one seed."""

    mean: float
    deviation: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """
    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("summary: want a value at least")
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def gaps(values: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """By seed, so much more than the baseline: same first weights and same batches; only seeds that both have."""
    return [values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())]


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """
    Raises:
        ValueError: curves of different lengths.
    """
    return [statistics.fmean(points) for points in zip(*curves, strict=True)]


def reached(curve: Sequence[float], loss: float) -> float | None:
    """Share of the run after which the curve is at `loss` or below for good; None if never.

    A window's mean is taken to hold at its end.
    """
    after = len(curve)
    while after and curve[after - 1] <= loss:
        after -= 1
    return None if after == len(curve) else (after + 1) / len(curve)


def trailing(curve: Sequence[float], windows: int) -> list[float]:
    """The mean of each point and those before it, `windows` in all; fewer at the start."""
    return [statistics.fmean(curve[max(0, end - windows) : end]) for end in range(1, len(curve) + 1)]


def seconds_by_mode(turns: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Median seconds a step of every mode over the rounds; "ddp" is the faster of DDP's bucket sizes."""
    found: dict[str, list[float]] = {}
    for turn in turns:
        found.setdefault(str(turn["mode"]), []).append(float(str(turn["step_seconds"])))
    medians = {mode: statistics.median(seconds) for mode, seconds in found.items()}
    buckets = [seconds for mode, seconds in medians.items() if mode.startswith("ddp_")]
    return {**medians, "ddp": min(buckets)} if buckets else medians
