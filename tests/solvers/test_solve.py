"""`solve`: every method gives what the loop gives, and says by which passes."""

import pytest
import torch
from plain_loops import METHODS, NAMES, integers, one_by_one, reals

from armillary import solvers

SIZES = (0, 1, 7, 64)


@pytest.mark.parametrize("unknowns", SIZES)
@pytest.mark.parametrize(("method", "options"), METHODS, ids=NAMES)
def test_integers_are_those_of_the_loop(method, options, unknowns):
    for seed in range(4):
        update, start = integers(unknowns, seed)
        solved = solvers.solve(update, start, method=method, **options)
        assert torch.equal(solved.states, one_by_one(update, start)), solved.said
        assert solved.passes <= unknowns * max(1, options.get("block", 1))


@pytest.mark.parametrize("unknowns", SIZES)
@pytest.mark.parametrize("tolerance", [0.0, 1e-13])
@pytest.mark.parametrize(("method", "options"), METHODS, ids=NAMES)
def test_real_numbers_are_those_of_the_loop(method, options, tolerance, unknowns):
    update, start = reals(unknowns)
    solved = solvers.solve(update, start, method=method, tolerance=tolerance, **options)
    assert torch.allclose(solved.states, one_by_one(update, start), rtol=0, atol=1e-12)
    assert torch.equal(start, torch.zeros_like(start))


@pytest.mark.parametrize(("method", "options"), METHODS, ids=NAMES)
def test_a_residual_within_the_tolerance_is_measured(method, options):
    update, start = reals(64)
    solved = solvers.solve(update, start, method=method, tolerance=1e-6, **options)
    new = update(solved.states, slice(0, 64))
    assert ((new - solved.states).abs() <= 1e-6 * solved.states.abs().clamp(min=1)).all()
    assert ("residual <= 1e-06" in solved.said) == (method != "in_order")


@pytest.mark.parametrize("start_at", [0, 3])
def test_after_k_sweeps_the_first_k_are_final(start_at):
    update, start = integers(64)
    truth, seen = one_by_one(update, start), []

    def watched(states, at):
        seen.append(states.clone())
        return update(states, at)

    solvers.solve(watched, start + start_at, method="jacobi", most_sweeps=100)
    for sweep, states in enumerate(seen):
        assert torch.equal(states[:sweep], truth[:sweep])


def test_a_window_evaluates_only_itself():
    update, start = integers(64)
    asked = []

    def watched(states, at):
        asked.append(len(range(64)[at]))
        return update(states, at)

    solved = solvers.solve(watched, start, method="gs_jacobi", window=16)
    assert max(asked) == 16 and len(asked) == solved.passes < 64


def test_it_says_what_it_did():
    update, start = integers(64)
    solved = solvers.solve(update, start, method="gs_jacobi", window=16)
    assert solved.said == str(solved) == f"gs_jacobi(window=16): {solved.passes} passes for 64 unknowns, proven"
    assert solvers.solve(update, start, method="in_order").said == "in_order: 64 passes for 64 unknowns"


def test_what_does_not_settle_is_finished_in_order():
    update, start = reals(64)
    solved = solvers.solve(update, start, method="jacobi", most_sweeps=3)
    assert torch.allclose(solved.states, one_by_one(update, start), rtol=0, atol=1e-12)
    assert "no proof within 3 sweeps, finished in order" in solved.said and solved.passes > 3


def test_numbers_that_are_not_finite_on_the_way_are_finished_in_order():
    def update(states, at):
        before = torch.cat([torch.ones(1, dtype=torch.float64), states])[at]
        return 1 / before - 0.5

    solved = solvers.solve(update, torch.zeros(6, dtype=torch.float64), method="jacobi")
    assert torch.equal(solved.states, one_by_one(update, torch.zeros(6, dtype=torch.float64)))
    assert "not finite, finished in order" in solved.said


@pytest.mark.parametrize(("method", "options"), METHODS, ids=NAMES)
def test_a_system_without_a_batch(method, options):
    def update(states, at):
        return (torch.cat([states.new_ones(1), states])[at] * 3 + 1) % 11

    start = torch.zeros(20, dtype=torch.long)
    assert torch.equal(solvers.solve(update, start, method=method, **options).states, one_by_one(update, start))
