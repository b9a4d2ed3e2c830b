"""What a gradient takes as it lands is what collecting it takes beyond leaving it, and never less than nothing."""

import pytest

from armillary.runtime import tensor_timer


class Played:
    """A timer that does the work once and says what it is told."""

    device = "cpu"

    def __init__(self, *seconds):
        self.left = list(seconds)

    def seconds(self, work):
        work()
        return self.left.pop(0)


@pytest.mark.parametrize(("landed", "left", "each"), [(0.05, 0.018, 0.001), (0.018, 0.05, 0.0)])
def test_a_gradient_lands_in_what_is_left_of_two_times(landed, left, each):
    assert tensor_timer.landing_seconds(Played(landed, left)) == pytest.approx(each)
