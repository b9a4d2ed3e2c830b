"""Faults planted in the methods: a test that is green above is red with each of them."""

import importlib
import inspect

import pytest
import test_recur
import test_sample
import test_solve

A_CELL = ("newton", {}, (3,), 64)
FAULTS = {
    "a window moves one too far": (
        "gs_jacobi:gs_jacobi", "settled + 1, len(new)", "settled + 2, len(new)",
        lambda: test_solve.test_integers_are_those_of_the_loop("gs_jacobi", {"window": 5}, 64),
    ),
    "a sweep counts one too many as settled": (
        "jacobi:jacobi", "else settled + 1", "else settled + 2",
        lambda: test_solve.test_what_does_not_settle_is_finished_in_order(),
    ),
    "no last evaluation: the change is small, so it is over": (
        "newton:newton", "return Attempt(states, sweep, len(states))",
        "return Attempt(states + change, sweep, len(states))",
        lambda: test_recur.test_the_residual_of_newton_is_that_of_its_answer(),
    ),
    "noise drawn anew in every sweep": (
        "sample:_Model.update", "self.noise[:, at]", "torch.rand_like(self.noise[:, at])",
        lambda: test_sample.test_samples_are_those_of_the_loop("jacobi", {}),
    ),
    "J of the wrong step": (
        "newton:newton", "scan(jacobians,", "scan(jacobians.roll(-1, 0),",
        lambda: test_recur.test_a_linear_recurrence_takes_one_sweep_and_its_proof(),
    ),
    "J of the wrong step in the adjoint": (
        "adjoint:_reverse_scan", ".roll(1, 0)", "",
        lambda: test_recur.test_states_and_gradients_are_those_of_the_loop(*A_CELL),
    ),
    "an adjoint scanned forwards": (
        "adjoint:_reverse_scan", "scan(jacobians.flip(0).roll(1, 0), added.flip(0)).flip(0)", "scan(jacobians, added)",
        lambda: test_recur.test_states_and_gradients_are_those_of_the_loop(*A_CELL),
    ),
    "a diagonal adjoint": (
        "adjoint:_iterated", "            return moved", "            return None\n        return moved",
        lambda: test_recur.test_states_and_gradients_are_those_of_the_loop("newton", {"diagonal": True}, (3,), 64),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(monkeypatch, fault):
    place, right, wrong, judge = FAULTS[fault]
    name, _, path = place.partition(":")
    module = importlib.import_module(f"armillary.solvers.{name}")
    source = inspect.getsource(module)
    assert source.count(right) == 1
    names = {"__name__": module.__name__}
    exec(compile(source.replace(right, wrong), module.__file__, "exec"), names)
    mine, planted = module, names
    for part in path.split("."):
        mine = getattr(mine, part)
        planted = planted[part] if isinstance(planted, dict) else getattr(planted, part)
    judge()  # green before
    monkeypatch.setattr(mine, "__code__", planted.__code__)
    with pytest.raises(AssertionError):
        judge()
