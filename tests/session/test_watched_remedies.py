"""Where nothing fits under `parallelize(model, optimizer)` alone, the error names two ways that would, with figures."""

import gc
import re
import weakref

import pytest
import torch
from torch import nn

import armillary
from armillary.session import parallelize as parallelize_file
from planning_cases import machines

WIDTH, SAMPLES, BLOCKS = 64, 512, 4
ROWS = 50_000


def blocks():
    """Whose activations are more than its weights, gradients and momenta."""
    parts = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
    return nn.Sequential(*parts)


def table():
    return nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1))


class Asking(nn.Module):
    """As SyncBatchNorm does: every forward asks all ranks."""

    def forward(self, x):
        mean = x.detach().mean()
        torch.distributed.all_reduce(mean)
        return x - mean


def asking():
    return nn.Sequential(blocks(), Asking())


def refused(rank, workers, made, free_bytes, batch):
    """What two watched steps raise, and whether a hook of ours is left on the model."""
    torch.manual_seed(0)
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallelize_file, "measure_links", lambda _: machines(1, workers, memory=free_bytes))
        try:
            run = armillary.parallelize(model, optimizer)
        except ValueError as error:
            return str(error), 0
        with pytest.raises(ValueError, match="nothing fits") as found:
            two_steps(model, optimizer, batch)
        run.close()
    return str(found.value), len(model._forward_pre_hooks)


def two_steps(model, optimizer, batch):
    for _ in range(2):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def test_after_the_watched_steps_methods_are_tried_on_the_batch_that_was_seen(crew):
    """What a step makes beside the weights: as much again twice, and activations. Half of the former does not fit."""
    weights, activations = (4 * BLOCKS * numbers for numbers in (8 * WIDTH * WIDTH, SAMPLES * 9 * WIDTH))
    room = activations + 5 * weights // 4
    for said, hooks in crew(2).run(refused, blocks, room, torch.randn(SAMPLES, WIDTH)):
        assert hooks == 0
        told = said.split("these would do best:")[1].strip().splitlines()
        assert len(told) == 2 and "KARMA" in said and "exact): " in told[0], said
        assert all(re.search(r"\): [\d.]+ [KM]iB, [\d.]+ [mu]?s a step: \w+", one) for one in told), said


def test_a_model_with_collectives_of_its_own_is_not_tried_by_rank_zero_alone(crew):
    room = 4 * BLOCKS * (SAMPLES * 9 * WIDTH + 10 * WIDTH * WIDTH)
    for said, hooks in crew(2).run(refused, asking, room, torch.randn(SAMPLES, WIDTH)):
        assert hooks == 0 and "KARMA" not in said, said


def test_before_the_first_step_two_ways_are_named_by_what_is_known_of_parameters(crew):
    weights = ROWS * WIDTH * 4
    for said, _ in crew(2).run(refused, table, weights, torch.randint(ROWS, (8,))):
        assert "the first steps would hold the whole model" in said and "batches=... and loss=..." in said
        told = said.partition("compares all methods):\n")[2].splitlines()
        assert len(told) == 2 and "row-wise sharding of 0.weight" in told[0] and "pipeline" in told[1], said
        assert all(re.search(r": [\d.]+ MiB a rank$", one) for one in told), said


def batches_that_outlive_the_watch(rank, workers):
    """Which of two watched batches are alive once the plan is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, seen = armillary.parallelize(model, optimizer, check_data=False), []
    for _ in range(2):
        batch = torch.randn(8, 4)
        seen.append(weakref.ref(batch))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    del batch
    gc.collect()
    alive = [one() is not None for one in seen]
    run.close()
    return alive


def test_no_batch_is_kept_once_the_plan_is_made(crew):
    assert crew(2).run(batches_that_outlive_the_watch) == [[False, False]] * 2
