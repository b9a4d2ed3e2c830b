"""A straight line through measured times: what each of a few amounts costs, none of them less than nothing.

Amounts differ by orders of magnitude (a kilobyte, ten megabytes), so errors are weighed relative to the time itself: a
plain least squares would hardly see the latency.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

__all__ = ["Line", "fit"]


class Line(NamedTuple):
    """costs: one per column. residual: largest relative error over the times it was fitted to."""

    costs: tuple[float, ...]
    residual: float


def fit(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> Line:
    """Least relative squares with no cost below zero: the best of the fits in which some costs are held at zero.

    Args:
        amounts: a row per time, for example (messages, bytes). seconds: the times, above zero.

    Raises:
        ValueError: fewer times than columns, or a time that is not above zero.
    """
    table, times = np.array(amounts, dtype=float), np.array(seconds, dtype=float)
    if table.ndim != 2 or len(table) != len(times) or len(times) < table.shape[1] or not (times > 0).all():
        raise ValueError(f"line: want a row of amounts per time and times above 0, got {amounts} and {seconds}")
    relative, ones = table / times[:, None], np.ones_like(times)
    scale = np.abs(relative).max(axis=0)
    relative = relative / np.where(scale > 0, scale, 1.0)
    columns = range(table.shape[1])
    best, best_square = np.zeros(len(columns)), np.inf
    for count in columns:
        for kept in combinations(columns, count + 1):
            costs = np.zeros(len(columns))
            costs[list(kept)] = np.linalg.lstsq(relative[:, list(kept)], ones, rcond=None)[0]
            square = float(((relative @ costs - ones) ** 2).sum())
            if costs.min() >= 0 and square < best_square:
                best, best_square = costs, square
    residual = float(np.abs(relative @ best - ones).max())
    return Line(tuple((best / np.where(scale > 0, scale, 1.0)).tolist()), residual)
