"""Laws of corrections: each formula by hand, the stability bounds by the roots of the delayed iteration, refusals."""

import math

import pytest
import torch

from armillary.plans import Choice
from armillary.schedules import CORRECTIONS, Correction, build_correction, read, stale_share
from armillary.schedules.corrections.stable_rate import rate_scale
from armillary.schedules.cyclic import cyclic
from armillary.schedules.simultaneous import simultaneous
from staged_models import OPTIMIZERS


def test_every_remedy_does_something_and_says_what():
    assert set(CORRECTIONS.all()) == {"nesterov", "weight_prediction", "stable_rate", "error_feedback"}
    for name in CORRECTIONS.all():
        correction = build_correction(name)
        assert correction.says.startswith(f"{name}: ")
        assert [correction.step_options, correction.gradient, correction.ahead].count(None) == 2
    with pytest.raises(ValueError, match="no correction 'prayer'; there are error_feedback, nesterov, stable_rate"):
        build_correction("prayer")
    assert Correction("nothing").unfit({}) == ""


def test_the_stale_share_of_a_stage_is_that_of_its_column():
    assert [stale_share(cyclic(4), stage) for stage in range(4)] == [3 / 4, 2 / 4, 1 / 4, 0.0]
    assert stale_share(cyclic(4, slack=4), 3) == 1.0 and stale_share(simultaneous(4, 2), 0) == 0.0


def stale_step(state, rate, share, momentum, correction=""):
    """Heavy ball on a quadratic of curvature 1, `share` of whose gradient is one step late; linear in the state.

    state: weight and velocity now, those of the step before, and the gradient of the step before.
    """
    weight, velocity, old_weight, old_velocity, old_gradient = state
    read = old_weight - rate * old_velocity if correction == "weight_prediction" else old_weight
    found = gradient = (1 - share) * weight + share * read
    if correction == "error_feedback":
        gradient = build_correction(correction).gradient(found, old_gradient, share)
    moved = momentum * velocity + gradient
    along = gradient + momentum * moved if correction == "nesterov" else moved
    return torch.stack([weight - rate * along, moved, weight, velocity, found])


def stable_up_to(share, momentum, correction=""):
    """The largest rate at which the iteration dies out, by bisection on the largest eigenvalue of its matrix."""
    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        columns = [stale_step(unit, middle, share, momentum, correction) for unit in torch.eye(5, dtype=torch.float64)]
        is_stable = float(torch.linalg.eigvals(torch.stack(columns, 1)).abs().max()) < 1
        low, high = (middle, high) if is_stable else (low, middle)
    return low


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
def test_the_rate_is_lowered_exactly_to_the_stability_bound(share, momentum):
    ratio = stable_up_to(share, momentum) / stable_up_to(0.0, momentum)
    assert rate_scale(share, momentum) == pytest.approx(min(1.0, ratio), rel=1e-6)


def test_what_corrections_give_back_of_the_stable_rate_when_all_is_late_at_momentum_nine_tenths():
    """By the characteristic polynomial of each: 0.100 without, 0.253 by Nesterov, 0.270 by prediction."""
    found = {name: stable_up_to(1.0, 0.9, name) for name in ("", "nesterov", "weight_prediction", "error_feedback")}
    assert found[""] == pytest.approx(0.1, abs=1e-9) and found["nesterov"] == pytest.approx(0.253, abs=5e-4)
    assert found["weight_prediction"] == pytest.approx(0.270, abs=5e-4)
    assert found["error_feedback"] == pytest.approx(found["weight_prediction"])  # the same, where gradients are linear


def test_one_late_step_at_momentum_nine_tenths_leaves_a_thirty_eighth():
    assert rate_scale(1.0, 0.9) == pytest.approx(1 / 38)
    changed = build_correction("stable_rate").step_options
    for options in ({"lr": 0.5, "momentum": 0.9}, {"lr": 0.5, "betas": (0.9, 0.999)}):
        assert changed(options, 1.0) == {**options, "lr": pytest.approx(0.5 / 38)}
    assert changed({"lr": 0.5}, 1.0)["lr"] == 0.25


def test_error_feedback_on_a_quadratic_is_the_gradient_where_the_weights_will_be():
    """Curvature h, weights that move evenly: the late gradients h w0, h w1 become h w2."""
    found = build_correction("error_feedback").gradient(torch.tensor(3.0 * 5), torch.tensor(3.0 * 4), 1.0)
    assert found == 3.0 * 6


@pytest.mark.parametrize("option", ["nesterov", "maximize"])
def test_prediction_by_sgd_goes_along_its_momentum(option):
    weight = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5, **{option: True})
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    buffer = optimizer.state[weight]["momentum_buffer"].clone()
    ahead = build_correction("weight_prediction").ahead
    group = optimizer.param_groups[0]
    assert torch.equal(ahead(weight.detach(), optimizer.state[weight], group, 2), weight.detach() - 0.2 * buffer)
    assert torch.equal(ahead(weight.detach(), {}, group, 2), weight.detach())
    here = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()  # momentum alone: it goes on the same way
    assert (weight.detach() - here) * (ahead(here, {"momentum_buffer": buffer}, group, 1) - here) > 0


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_prediction_by_adam_is_the_step_it_has_just_made(make):
    weight = torch.nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
    optimizer = make([weight], lr=0.1, weight_decay=0.0)
    for gradient in ([1.0, 3.0], [0.5, -2.0]):
        before = weight.detach().clone()
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    foretold = build_correction("weight_prediction").ahead(
        weight.detach(), optimizer.state[weight], optimizer.param_groups[0], 1
    )
    assert torch.allclose(foretold - weight.detach(), weight.detach() - before, rtol=1e-12)


def test_optimizers_that_a_remedy_cannot_work_with_are_named_with_what_to_take():
    def unfit(correction, optimizer):
        parameter = torch.nn.Parameter(torch.zeros(1))
        return build_correction(correction).unfit(OPTIMIZERS[optimizer]([parameter]).param_groups[0])

    assert "take torch.optim.NAdam" in unfit("nesterov", "adam") and unfit("nesterov", "momentum") == ""
    assert "wants SGD with momentum" in unfit("nesterov", "sgd")
    assert "wants momentum to go by" in unfit("weight_prediction", "sgd") == unfit("weight_prediction", "adagrad")
    assert [unfit("weight_prediction", name) for name in ("momentum", "adam", "adamw", "nadam")] == [""] * 4
    assert unfit("stable_rate", "adagrad") == unfit("error_feedback", "sgd") == ""


def test_options_name_corrections_and_a_ring_has_none():
    found = read(Choice("one_device", {"corrections": ["error_feedback", "stable_rate"]}), 1)
    assert (
        found.as_options()["corrections"] == ["error_feedback", "stable_rate"] and len(found.built_corrections()) == 2
    )
    assert math.isclose(found.built_corrections()[1].step_options({"lr": 1.0}, 1.0)["lr"], 0.5)
    for name, processes in (("ring", 2), ("zero_ring", 2), ("shared_stages", 3)):
        with pytest.raises(ValueError, match=f"{name} has no corrections; it may have"):
            read(Choice(name, {"corrections": ["stable_rate"]}), processes)
    with pytest.raises(ValueError, match="no correction 'prayer'"):
        read(Choice("one_device", {"corrections": ["prayer"]}), 1)
