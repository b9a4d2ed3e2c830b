"""What a record says: medians, quartiles, ratios taken pairwise, and a table of them.

A machine's own speed drifts (by half, on the one this was made on), so two medians from different minutes
say little about two modes. Blocks of one round ran next to each other: their ratio is taken first, and
the median over rounds of that.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.hybrid.record import Record

HEADER = (
    "mode",
    "ms a step: median (quartiles)",
    "times {baseline}: median (rounds)",
    "all ranks, ms a step",
    "MB a host sends: mean (worst)",
    "worst receives",
    "CPU, ms a rank",
    "peak MiB a rank",
)


@dataclass(frozen=True)
class Quartiles:
    """The middle of some numbers and the middle of either half of them, in their unit."""

    first: float
    median: float
    third: float


@dataclass(frozen=True)
class Summary:
    """One mode against the baseline; seconds and bytes are per step."""

    mode: str
    step_seconds: Quartiles  # of rank 0, all rounds together
    ratios: tuple[float, ...]  # to the baseline, one a round; under 1 is faster
    wall_seconds: float  # median over rounds
    cpu_seconds: float  # per rank, median over rounds
    mean_sent_bytes: float  # over hosts and rounds
    worst_sent_bytes: float  # of the host that sends most, mean over rounds
    worst_received_bytes: float
    peak_bytes: int  # largest over rounds

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def quartiles(numbers: Sequence[float]) -> Quartiles:
    """Interpolated linearly between the numbers, of which the least and the most are the ends.

    Raises:
        ValueError: no numbers.
    """
    if not numbers:
        raise ValueError("summary: no numbers, so no quartiles; want at least one")
    if len(numbers) == 1:
        return Quartiles(numbers[0], numbers[0], numbers[0])
    return Quartiles(*statistics.quantiles(numbers, n=4, method="inclusive"))


def over_each(seconds: Mapping[str, Sequence[float]], mode: str, rivals: Sequence[str]) -> dict[str, list[float]]:
    """By rival: times as fast as it, round by round; above 1 `mode` is the faster one.

    Args:
        seconds: by mode, one a round.
    """
    return {rival: [his / mine for his, mine in zip(seconds[rival], seconds[mode], strict=True)] for rival in rivals}


def over_best(ratios: Mapping[str, Sequence[float]]) -> tuple[str, Sequence[float]]:
    """The best rival, which is the one with the lowest median, and the ratios to it."""
    return min(ratios.items(), key=lambda pair: statistics.median(pair[1]))


def over_fastest_of_rounds(ratios: Mapping[str, Sequence[float]]) -> list[float]:
    """Times as fast as whichever rival was the fastest in that round: nobody can choose that one beforehand.

    Of rivals that do the same work it is the one that met no hiccup, so several equals beat each of themselves.
    """
    return [min(of_a_round) for of_a_round in zip(*ratios.values(), strict=True)]


def paired_ratios(record: Record, mode: str, baseline: str) -> tuple[float, ...]:
    """Median step of `mode` over median step of `baseline`, for each round by itself."""
    return tuple(
        statistics.median(one.step_seconds) / statistics.median(other.step_seconds)
        for one, other in zip(record.of(mode), record.of(baseline), strict=True)
    )


def summarise(record: Record, baseline: str) -> tuple[Summary, ...]:
    """
    Raises:
        ValueError: the baseline was not measured.
    """
    if baseline not in record.modes:
        raise ValueError(f"summary: no mode {baseline!r} in the record; there are {', '.join(record.modes)}")
    return tuple(_summary(record, mode, baseline) for mode in record.modes)


def table(record: Record, baseline: str) -> str:
    """The summary in Markdown, conditions above it."""
    conditions = ", ".join(f"{name} {said}" for name, said in record.conditions.items())
    rows = [tuple(cell.format(baseline=baseline) for cell in HEADER), ("---",) * len(HEADER)]
    rows += [_cells(one) for one in summarise(record, baseline)]
    return "\n".join([f"{conditions}.", "", *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _summary(record: Record, mode: str, baseline: str) -> Summary:
    blocks = record.of(mode)
    return Summary(
        mode=mode,
        step_seconds=quartiles([seconds for block in blocks for seconds in block.step_seconds]),
        ratios=paired_ratios(record, mode, baseline),
        wall_seconds=statistics.median(block.wall_seconds for block in blocks),
        cpu_seconds=statistics.median(block.cpu_seconds for block in blocks),
        mean_sent_bytes=statistics.fmean(sent for block in blocks for sent in block.sent_bytes),
        worst_sent_bytes=_worst([block.sent_bytes for block in blocks]),
        worst_received_bytes=_worst([block.received_bytes for block in blocks]),
        peak_bytes=max(block.peak_bytes for block in blocks),
    )


def _worst(by_round: Sequence[Sequence[float]]) -> float:
    """Of the host with the largest mean over rounds: a link is slow when its host always sends most."""
    return max(map(statistics.fmean, zip(*by_round, strict=True)))


def _cells(one: Summary) -> tuple[str, ...]:
    steps = one.step_seconds
    return (
        one.mode,
        f"{steps.median * 1e3:.0f} ({steps.first * 1e3:.0f}-{steps.third * 1e3:.0f})",
        f"{one.ratio:.2f} ({', '.join(f'{ratio:.2f}' for ratio in one.ratios)})",
        f"{one.wall_seconds * 1e3:.0f}",
        f"{one.mean_sent_bytes / 1e6:.2f} ({one.worst_sent_bytes / 1e6:.2f})",
        f"{one.worst_received_bytes / 1e6:.2f}",
        f"{one.cpu_seconds * 1e3:.0f}",
        f"{one.peak_bytes / 2**20:.0f}",
    )
