"""What a tensor takes in a step and as it lands is worked out from times as it should be, by a made-up clock."""

import pytest

from armillary.measuring import processor as tensor_timer


class Played:
    """A timer that does the work once and says what it is told."""

    device = "cpu"

    def __init__(self, *seconds):
        self.left = list(seconds)
        self.timed = []

    def seconds(self, work):
        work()
        self.timed.append(work)
        return self.left.pop(0)

    def agree(self, seconds):
        return seconds


@pytest.mark.parametrize(("landed", "left", "each"), [(0.05, 0.018, 0.001), (0.018, 0.05, 0.0)])
def test_a_gradient_lands_in_what_is_left_of_two_times(landed, left, each):
    assert tensor_timer.landing_seconds(Played(landed, left)) == pytest.approx(each)


def test_rates_are_of_sgd_with_momentum_and_adam_by_tensor_and_by_byte():
    rates = [(1e-6, 1e-11), (2e-6, 3e-11), (2e-5, 7e-11)]
    played = Played(*(32 * (tensor + byte * 4 * n) for tensor, byte in rates for n in (16, 1 << 14)))
    found = tensor_timer.update_rates(played)
    assert [(one.tensor_seconds, one.byte_seconds) for one in found] == [pytest.approx(one) for one in rates]
    stepped = [work.__self__ for work in played.timed[::2]]
    assert [(type(one).__name__, one.defaults.get("momentum")) for one in stepped] == [
        ("SGD", 0), ("SGD", 0.9), ("Adam", None)
    ]  # fmt: skip
    assert [len(one.state[one.param_groups[0]["params"][0]]) for one in stepped] == [0, 1, 3]  # Adam counts steps, too
