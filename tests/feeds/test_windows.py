"""Which snapshots a window holds, by the rules alone; the reservoir is uniform."""

import math
from collections import Counter

import pytest
import torch

from armillary import feeds
from armillary.feeds.windows import Reservoir

N, SEEN, TURNS = 5, 40, 4_000  # 20,000 places


def held_by(window, seen, draw, batch=4):
    """The numbers of the snapshots that are there after so many."""
    held = []
    for number in range(seen):
        row = window.row(number, len(held), window.rows(batch), draw)
        if row is not None:
            held[row : row + 1] = [number]
    return held


def chi_square(window):
    """Of how often each of the snapshots is held, against as often as all."""
    draw = torch.Generator().manual_seed(0)
    counts = Counter(number for _ in range(TURNS) for number in held_by(window, SEEN, draw))
    mean = N * TURNS / SEEN
    # each turn holds N different ones, so counts vary by (1 - N / SEEN) of what independent places would
    return sum((counts[number] - mean) ** 2 / mean for number in range(SEEN)) / (1 - N / SEEN)


FREE = SEEN - 1
MOST = FREE * (1 - 2 / (9 * FREE) + 3.09 * math.sqrt(2 / (9 * FREE))) ** 3  # 0.1 % of uniform ones are above


def test_a_reservoir_is_uniform():
    assert chi_square(feeds.Reservoir(N)) < MOST


class Skewed(Reservoir):
    def row(self, seen, held, rows, draw):
        """As if a snapshot less had come: a common slip."""
        return held if held < rows else Reservoir.row(self, max(seen * 9 // 10, rows), held, rows, draw)


def test_a_reservoir_that_is_not_uniform_is_seen():
    assert chi_square(Skewed(N)) > MOST


def test_the_latest_are_the_newest():
    assert sorted(held_by(feeds.Latest(3), 11, torch.Generator())) == [8, 9, 10]


@pytest.mark.parametrize("window", [feeds.Latest(6), feeds.Reservoir(6)])
def test_a_batch_repeats_nothing(window):
    draw = torch.Generator().manual_seed(1)
    for _ in range(20):
        assert len(set(window.drawn(6, 4, draw).tolist())) == 4


@pytest.mark.parametrize("kind", [feeds.Latest, feeds.Reservoir])
def test_a_window_of_nothing_is_refused(kind):
    with pytest.raises(ValueError, match="at least 1 snapshot, got 0"):
        kind(0)
