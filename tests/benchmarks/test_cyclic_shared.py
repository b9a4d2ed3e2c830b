"""Shared devices' benchmark: what it compares with trains as one process does; forecasts and columns by hand."""

import pytest
import torch
from benchmarks.cyclic_shared.modes import forecast, replica
from benchmarks.cyclic_shared.run import table

from armillary.reference.versions import Reference
from armillary.schedules.accumulation import accumulation
from armillary.transport.transport import Transport
from staged_models import OPTIMIZERS, as_stages, data, drop, same, squared_error, stages_of, weights

STEPS, DROP = 4, 2


def train_a_replica(rank, world):
    transport = Transport(2)
    stages = stages_of(2, dropout=0.0)
    own = as_stages(stages)[rank % 2]
    optimizer = OPTIMIZERS["momentum"](own.module.parameters())
    run, scheduler = replica(own, optimizer, squared_error, transport), drop(optimizer, DROP)
    for batches in data(STEPS, 2):
        run.step([batches[rank // 2]])
        scheduler.step()
    run.settle()
    transport.barrier()
    transport.close()
    return weights(own.module)


def test_replicas_of_stages_train_as_one_process_does(crew):
    stages = stages_of(2, dropout=0.0)
    optimizer = OPTIMIZERS["momentum"](stages.parameters())
    truth, scheduler = Reference(stages, optimizer, accumulation(2, 2), squared_error), drop(optimizer, DROP)
    for batches in data(STEPS, 2):
        truth.step(batches)
        scheduler.step()
    answers = crew(4).run(train_a_replica)
    for rank, got in enumerate(answers):
        assert same(got, answers[rank % 2])
        torch.testing.assert_close(got, weights(stages[rank % 2]), rtol=1e-12, atol=1e-12)
    assert not same(answers[0], weights(stages_of(2, dropout=0.0)[0]))


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_forecasts_are_one_in_n_two_in_n_plus_one_and_all(workers):
    found = {mode: forecast(mode, workers, 0) for mode in ("replicas", "shared", "pipeline")}
    assert {mode: one.devices for mode, one in found.items()} == {
        "replicas": workers**2, "shared": workers * (workers + 1) // 2, "pipeline": workers,
    }  # fmt: skip
    assert [one.busy_share for one in found.values()] == pytest.approx([1 / workers, 2 / (workers + 1), 1.0])
    assert [one.held for one in found.values()] == [1, 1, workers]


def test_the_columns_by_hand():
    """Two devices of a pipeline; the slower one's steps count, and what grows with samples is scaled to all of them."""
    few = [{"peak_bytes": 20e6}, {"peak_bytes": 25e6}]
    many = [
        {"peak_bytes": 40e6, "step_seconds": [0.4, 0.5, 0.4], "busy_seconds": 0.39},
        {"peak_bytes": 35e6, "step_seconds": [0.5, 0.4, 0.4], "busy_seconds": 0.26},
    ]
    cell = {
        "mode": "pipeline", "workers": 2, "machine": "a machine", "layers": 8, "weight_bytes": 8e6,
        "activation_bytes": 16e6, "few": few, "many": many,
    }  # fmt: skip
    record = {"slack": 0, "samples": 4, "stage_seconds": 0.2, "rounds": 3, "steps": 6, "cells": [cell]}
    assert table(record)[-1] == (
        "| 2 | pipeline | 2 | 500 (450-500) | 16 | 8 | 75% (60%-90%) | 100% | 38 (40) | 30 (40) | 32 |"
    )
