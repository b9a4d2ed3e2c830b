"""A line through times finds what made them, sees small costs beside large ones, and never finds a negative one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.measuring.processor import linear_fit

SIZES = (1e3, 1e5, 1e7)


@given(st.floats(1e-6, 1e-2), st.floats(1e-11, 1e-7))
def test_it_finds_latency_and_bandwidth_of_exact_times(latency, byte):
    line = linear_fit([(6.0, size) for size in SIZES], [6 * latency + size * byte for size in SIZES])
    assert line.costs == pytest.approx((latency, byte), rel=1e-4)
    assert line.residual < 1e-6


def test_it_finds_three_costs():
    amounts = [(1.0, rows, rows * width) for rows in (10.0, 100.0, 1000.0) for width in (4.0, 400.0)]
    seconds = [2e-6 + rows * 3e-8 + size * 5e-10 for _, rows, size in amounts]
    assert linear_fit(amounts, seconds).costs == pytest.approx((2e-6, 3e-8, 5e-10), rel=1e-6)


def test_what_would_be_negative_is_nothing():
    """Larger messages that take less time do not make a link of negative speed."""
    line = linear_fit([(1.0, 1e3), (1.0, 1e6)], [2e-3, 1e-3])
    assert line.costs[1] == 0.0 and 1e-3 < line.costs[0] < 2e-3


def test_the_residual_is_the_largest_relative_error():
    line = linear_fit([(1.0,), (1.0,), (1.0,)], [1.0, 1.0, 2.0])
    cost = line.costs[0]
    assert line.residual == pytest.approx(max(abs(cost - 1), abs(cost / 2 - 1)))


@pytest.mark.parametrize(
    ("amounts", "seconds"), [([(1.0, 2.0)], [1.0]), ([(1.0,), (2.0,)], [1.0, 0.0]), ([(1.0,)], [1.0, 2.0])]
)
def test_too_few_times_and_times_of_nothing_are_refused(amounts, seconds):
    with pytest.raises(ValueError, match="want a row of amounts per time"):
        linear_fit(amounts, seconds)
