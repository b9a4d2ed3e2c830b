"""Quartiles, and ratios taken pairwise between contenders that ran by turns.

A machine's own speed drifts (by half, on the one this was made on), so two medians from different minutes
say little about two modes. Blocks of one round ran next to each other: their ratio is taken first, and
the median over rounds of that.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Quartiles:
    """The middle of some numbers and the middle of either half of them, in their unit."""

    first: float
    median: float
    third: float


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
