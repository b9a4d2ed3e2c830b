"""Stage times are those of all ranks at once, alike everywhere, and a rank that cannot step stops all of them."""

import time
from itertools import count
from unittest.mock import patch

import pytest
import torch
from torch import nn

from armillary.models.structure import OUTSIDE
from armillary.profiler.probe import profile_concurrently
from armillary.profiler.profiler import profile
from armillary.session.plan_job import open_transport


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

    steps = count()

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
        found = profile_concurrently(before, model, draw, failing_loss, transport)
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


def held_up_by_turns(rank, workers):
    model, batch = nn.Sequential(Slow(0)), torch.ones(2, 3)
    before = profile(model, [batch] * workers, loss, workers=workers)
    steps = count(rank)

    def played(model, batch, loss, paths, tables):
        return dict.fromkeys((*paths, OUTSIDE), (0.030, 0.060) if next(steps) % 2 else (0.012, 0.024))

    transport = open_transport()
    try:
        with patch("armillary.profiler.probe.timed_step", played):
            return profile_concurrently(before, model, lambda: batch, loss, transport)
    finally:
        transport.close()


def test_ranks_that_are_held_up_by_turns_hold_up_every_step(crew):
    first, second = crew(2).run(held_up_by_turns)
    assert first == second
    for stage in first.stages:
        assert (stage.forward_seconds, stage.backward_seconds) == pytest.approx((0.030, 0.060))


def timed_alone(rank, workers, seconds, held_up):
    """What came of it, and after how many steps."""
    model, batch = nn.Sequential(Slow(0)), torch.ones(2, 3)
    before = profile(model, [batch], loss, workers=1)
    taken = []

    def played(model, batch, loss, paths, tables):
        taken.append(10 * seconds if held_up and len(taken) % 6 == 5 else seconds)
        return dict.fromkeys((*paths, OUTSIDE), (taken[-1], 2 * taken[-1]))

    transport = open_transport()
    try:
        with patch("armillary.profiler.probe.timed_step", played):
            return profile_concurrently(before, model, lambda: batch, loss, transport), len(taken)
    finally:
        transport.close()


def test_steps_that_were_held_up_do_not_count(crew):
    ((found, _),) = crew(1).run(timed_alone, 0.02, True)
    for stage in found.stages:
        assert (stage.forward_seconds, stage.backward_seconds) == pytest.approx((0.02, 0.04))


@pytest.mark.parametrize(("seconds", "steps"), [(5.0, 6), (0.02, 9), (0.001, 32)])
def test_a_second_of_steps_is_timed_and_six_of_a_large_model_and_no_more_than_some_of_a_small_one(crew, seconds, steps):
    ((found, taken),) = crew(1).run(timed_alone, seconds, False)
    assert steps <= taken - 1 < steps + 4
    assert sum(stage.forward_seconds for stage in found.stages) == pytest.approx(len(found.stages) * seconds)


@pytest.mark.parametrize(("failing", "step"), [(0, 0), (1, 0), (1, 3)])
def test_a_rank_that_cannot_draw_or_step_stops_every_rank_by_name(crew, failing, step):
    answers = crew(2).run(stepped, (0.0, 0.0), failing, step)
    assert answers == [f"profile: a step failed on rank {failing}: LookupError: no data here"] * 2
