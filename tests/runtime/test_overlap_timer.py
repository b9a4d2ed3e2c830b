"""How much of a request hides behind compute, on a made-up clock where it is known."""

import pytest

from armillary.exchanges.exchange import Place
from armillary.runtime import overlap_timer
from armillary.runtime.overlap_timer import hidden_share


class Clocked:
    """A job of 4 ranks: a request takes 40 ms, of which `share` needs no processor."""

    def __init__(self, share, workers=4):
        self.place, self.share = Place(0, workers), share
        self.now, self.done = 0.0, 0.0

    def barrier(self):
        self.now += 0.5

    def agree_largest(self, values):
        return list(values)

    def complete(self, program, label):
        """A burst is used up."""

    def start(self, request, label):
        shown, self.done = (1 - self.share) * 0.04, self.now + 0.04
        self.carried = shown

        def wait():
            if self.computed:  # what compute did not leave to it
                self.now += self.carried
            self.now, self.computed = max(self.now, self.done), False

        self.computed = False
        return wait

    def mm(self, *_):
        self.now += 0.001
        self.computed = True


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_it_is_the_share_that_compute_and_a_request_take_less_together(monkeypatch, share):
    job = Clocked(share)
    monkeypatch.setattr(overlap_timer.time, "perf_counter", lambda: job.now)
    monkeypatch.setattr(overlap_timer.torch, "mm", job.mm)
    assert hidden_share(job) == pytest.approx(share, abs=0.03)


def test_alone_there_is_nothing_to_hide():
    assert hidden_share(Clocked(0.0, workers=1)) == 1.0
