"""How much of a request hides behind compute, on a made-up clock where it is known."""

import pytest

from armillary.exchanges import RankInfo
from armillary.measuring import links as overlap_timer
from armillary.measuring.links import beside_seconds, hidden_share


class Clocked:
    """A job of 4 ranks: a request of 256 KiB takes so many seconds, larger ones in proportion, one after another; of
    that time `share` needs no processor."""

    def __init__(self, share, seconds=0.04, workers=4):
        self.place, self.share, self.seconds = RankInfo(0, workers), share, seconds
        self.now, self.done = 0.0, 0.0
        self.carried = 0.0  # by a processor that has computed meanwhile
        self.computed = False
        self.bytes = []  # of the requests under way, and of all that were together
        self.flown = set()

    def barrier(self):
        self.now += 0.5

    def agree_largest(self, values):
        return list(values)

    def complete(self, program, label):
        """A burst is used up."""

    def start(self, request, label):
        seconds = self.seconds * request.tensor.nbytes / (1 << 18)
        self.done = max(self.now, self.done) + seconds
        self.carried += (1 - self.share) * seconds
        self.bytes.append(request.tensor.nbytes)

        def wait():
            self.flown.add(tuple(self.bytes))
            if self.computed:  # what compute did not leave to it
                self.now += self.carried
            self.now, self.computed, self.carried = max(self.now, self.done), False, 0.0
            self.bytes = []

        return wait

    def mm(self, *_):
        self.now += 0.0001
        self.computed = True


def measured(monkeypatch, job):
    monkeypatch.setattr(overlap_timer.time, "perf_counter", lambda: job.now)
    monkeypatch.setattr(overlap_timer.torch, "mm", job.mm)
    return hidden_share(job)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seconds", [0.04, 0.004, 0.0002])
def test_it_is_the_share_that_compute_and_requests_take_less_together(monkeypatch, share, seconds):
    assert measured(monkeypatch, Clocked(share, seconds)) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [(0.04, (1 << 18,)), (0.004, (1 << 18,) * 5), (0.00125, (1 << 19,) * 8), (1e-6, (1 << 22,) * 8)],
)
def test_requests_are_as_many_and_as_large_as_it_takes(monkeypatch, seconds, wanted):
    """One that takes a millisecond would tell noise; one of a slow link is long enough."""
    job = Clocked(0.5, seconds)
    measured(monkeypatch, job)
    assert max(job.flown, key=sum) == wanted


def test_alone_there_is_nothing_to_hide():
    assert hidden_share(Clocked(0.0, workers=1)) == 1.0


class Calling(Clocked):
    """As many seconds go to each call, whatever it carries; on the way it needs nobody."""

    def __init__(self, called):
        super().__init__(1.0, seconds=1e-6, workers=2)
        self.called = called

    def start(self, request, label):
        self.now += self.called
        return super().start(request, label)


@pytest.mark.parametrize("called", [0.0, 0.0004, 0.003])
@pytest.mark.parametrize("kind", ["AllReduce", "AllGather", "AllToAll"])
def test_what_a_small_request_takes_of_compute_is_its_call(monkeypatch, called, kind):
    job = Calling(called)
    monkeypatch.setattr(overlap_timer.time, "perf_counter", lambda: job.now)
    monkeypatch.setattr(overlap_timer.torch, "mm", job.mm)
    assert beside_seconds(job, [kind])[kind].seconds == pytest.approx(called, abs=2e-6)
