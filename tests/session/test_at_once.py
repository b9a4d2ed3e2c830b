"""Stage times are those of all ranks at once, alike everywhere, and a rank that cannot step stops all of them."""

import time

import pytest
import torch
from torch import nn

from armillary.runtime.watch.profiler import profile
from armillary.session.at_once import timed_at_once
from armillary.session.decide import open_transport


class Slow(nn.Module):
    """A layer that takes its time, on one rank longer than on the other."""

    def __init__(self, seconds):
        super().__init__()
        self.layer, self.seconds = nn.Linear(3, 3), seconds
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        time.sleep(self.seconds)
        return self.layer(x)


def loss(model, batch):
    return model(batch).sum()


def stepped(rank, workers, seconds, failing, failing_step=0):
    transport = open_transport()
    torch.manual_seed(0)
    model, batch = nn.Sequential(Slow(seconds[rank])), torch.ones(2, 3)
    model[0].layer.weight.grad = torch.full((3, 3), 7.0)
    before = profile(model, [batch] * workers, loss, workers=workers)

    steps = iter(range(100))

    def draw():
        if rank == failing and not failing_step:
            raise LookupError("no data here")
        return batch

    def failing_loss(model, batch):
        if next(steps) == failing_step and rank == failing and failing_step:
            raise LookupError("no data here")
        return loss(model, batch)

    stream = torch.get_rng_state()
    try:
        found = timed_at_once(before, model, draw, failing_loss, transport)
    except ValueError as error:
        return str(error)
    finally:
        transport.close()
    assert torch.equal(stream, torch.get_rng_state()) and float(model[0].calls) == 0
    assert torch.equal(model[0].layer.weight.grad, torch.full((3, 3), 7.0))
    return found


def test_all_ranks_wait_for_the_slowest_so_its_times_count(crew):
    first, second = crew(2).run(stepped, (0.002, 0.030), None)
    assert first == second
    assert sum(stage.forward_seconds for stage in first.stages) >= 0.030
    (slow,) = crew(2).run(stepped, (0.030, 0.002), None)[:1]
    assert sum(stage.forward_seconds for stage in slow.stages) >= 0.030


@pytest.mark.parametrize(("failing", "step"), [(0, 0), (1, 0), (1, 3)])
def test_a_rank_that_cannot_draw_or_step_stops_every_rank_by_name(crew, failing, step):
    answers = crew(2).run(stepped, (0.0, 0.0), failing, step)
    assert answers == [f"profile: a step failed on rank {failing}: LookupError: no data here"] * 2
