"""The arithmetic of the accuracy benchmark: rates, sweeps, gaps between seeds, time axes and the stability formula."""

import math

import numpy as np
import pytest
import torch
from benchmarks.cyclic_accuracy.boundary import formula, last_stable
from benchmarks.cyclic_accuracy.clock import link_mbit
from benchmarks.cyclic_accuracy.language_stages import language_stages, sampled_loss
from benchmarks.cyclic_accuracy.rules import WORKERS, rules_of
from benchmarks.cyclic_accuracy.run import best_rate, beyond
from benchmarks.cyclic_accuracy.summary import gaps, mean_curve, reached, seconds_by_mode, spread, trailing
from benchmarks.cyclic_accuracy.train import Settings, rate_at, windows

from armillary.workloads.language_model import SMALL, workload


def radius(a: float, share: float, momentum: float) -> float:
    """The largest root of the delayed iteration's polynomial, for a = rate x curvature."""
    return float(np.abs(np.roots([1, -(1 + momentum - a * (1 - share)), momentum + a * share])).max())


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_formula_is_where_the_polynomials_largest_root_crosses_one(share, momentum):
    bound = formula(share, momentum)
    assert radius(bound * 0.999, share, momentum) < 1 < radius(bound * 1.001, share, momentum)


def test_the_formula_gives_the_notes_figures():
    assert formula(0.0, 0.9) == pytest.approx(3.8)
    assert formula(1.0, 0.9) == pytest.approx(0.1)


def test_the_last_stable_point_is_the_one_before_the_first_that_is_not():
    assert last_stable([1.0, 2.0, 3.0, 4.0], [True, True, False, True]) == 2.0
    for outside in ([True] * 4, [False] * 4):
        with pytest.raises(ValueError, match=r"outside 1\.0 to 4\.0"):
            last_stable([1.0, 2.0, 3.0, 4.0], outside)


def test_a_sweep_goes_on_past_an_end_that_is_best_and_only_there():
    assert best_rate({0.1: 2.0, 0.2: 1.0, 0.4: 3.0}) == 0.2
    assert beyond({0.1: 2.0, 0.2: 1.0, 0.4: 3.0}) is None
    assert beyond({0.1: 3.0, 0.2: 2.0, 0.4: 1.0}) == 0.8
    assert beyond({0.1: 1.0, 0.2: 2.0, 0.4: math.inf}) == 0.05
    assert beyond({float(rate): -float(rate) for rate in range(7)}) is None  # as many as it may try


def test_the_rate_rises_for_a_tenth_and_then_only_falls():
    rates = [rate_at(step, 200, 0.4) for step in range(200)]
    assert max(rates) == rates[20] == 0.4
    assert rates[:21] == sorted(rates[:21]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[0] > 0 and rates[-1] < 0.001


def test_windows_are_means_of_equal_parts():
    assert windows([float(step // 4) for step in range(200)], 200) == [float(place) for place in range(50)]


def test_gaps_pair_the_seeds_that_both_have():
    assert gaps({2: 5.0, 0: 1.0, 7: 9.0}, {0: 0.5, 2: 7.0}) == [0.5, -2.0]


def test_a_spread_is_of_the_sample():
    found = spread([1.0, 2.0, 3.0])
    assert (found.mean, found.deviation, found.count) == (2.0, 1.0, 3)
    assert spread([4.0]).deviation == 0.0
    with pytest.raises(ValueError, match="a value"):
        spread([])


def test_a_mean_curve_wants_curves_of_one_length():
    assert mean_curve([[1.0, 2.0], [3.0, 6.0]]) == [2.0, 4.0]
    with pytest.raises(ValueError, match="shorter"):
        mean_curve([[1.0, 2.0], [3.0]])


def test_a_loss_is_reached_where_the_curve_stays_below_it():
    assert reached([3.0, 1.0, 2.5, 2.0, 1.0], 2.0) == 4 / 5
    assert reached([3.0, 2.0], 1.0) is None
    assert reached([1.0, 1.0], 1.0) == 1 / 2


def test_a_trailing_mean_looks_back_only():
    assert trailing([4.0, 2.0, 0.0, 1.0], 2) == [4.0, 3.0, 1.0, 0.5]


def test_a_modes_seconds_are_medians_and_ddp_is_its_faster_bucket_size():
    found = [("ddp_25mb", 5.0), ("ddp_small", 4.0), ("ddp_25mb", 1.0), ("ddp_25mb", 3.0), ("delayed", 2.0)]
    turns = [{"mode": mode, "step_seconds": seconds} for mode, seconds in found]
    assert seconds_by_mode(turns) == {"ddp_25mb": 3.0, "ddp_small": 4.0, "delayed": 2.0, "ddp": 3.0}


def test_the_link_carries_an_all_reduce_in_the_time_of_the_compute():
    gradient_bytes, seconds = 4_000_000, 0.2
    sent_bits = 2 * (WORKERS - 1) / WORKERS * gradient_bytes * 8
    assert sent_bits / (link_mbit(gradient_bytes, seconds) * 1e6) == pytest.approx(seconds, rel=0.01)


def test_all_tasks_have_the_plain_rules_and_late_ones_are_late():
    for task in ("vision", "language_model"):
        rules = rules_of(task)
        costs = [(1.0, 2.0)] * WORKERS
        shares = {name: rules[name].schedule(costs).stale_share for name in ("dp", "v2", "slack1", "v1")}
        assert shares == {"dp": 0.0, "v2": 0.375, "slack1": 0.625, "v1": 1.0}


def test_settings_refuse_what_cannot_be_run():
    for wrong in (("vision", "v9", 0.1, 0, 100), ("vision", "dp", 0.0, 0, 100), ("vision", "dp", 0.1, 0, 5)):
        with pytest.raises(ValueError, match="cyclic_accuracy: want"):
            Settings(*wrong)


def test_the_language_stages_compute_the_models_loss_and_gradients_bit_for_bit():
    work = workload(**SMALL)
    torch.manual_seed(0)
    model = work.model()
    batch = next(iter(work.batches("train", 0, 1, 0)))
    parameters = list(model.parameters())
    whole = work.loss(model, batch)
    wanted = torch.autograd.grad(whole, parameters)
    value = batch
    for stage in language_stages(model):
        value = stage(value)
    loss = sampled_loss(value, None)
    assert torch.equal(loss, whole)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, parameters), wanted, strict=True))
    assert {id(p) for stage in language_stages(model) for p in stage.parameters()} == {id(p) for p in parameters}
