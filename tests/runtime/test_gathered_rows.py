"""For a step by the clock, tables give rows and learn nothing; then the model is what it was."""

import pytest
import torch

from armillary.models.structure import OUTSIDE
from armillary.profiler.probe import timed_step
from armillary.profiler.profiler import profile
from armillary.profiler.stages import gathering
from scenes import TABLES, Mixed, batch_of, loss


def test_the_loss_and_all_other_gradients_are_the_same_and_tables_have_none():
    torch.manual_seed(1)
    model, batch = Mixed(), batch_of(0, 1)
    parameters = dict(model.named_parameters())
    plain = loss(model, batch)
    plain.backward()
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None and name not in TABLES}
    model.zero_grad()
    with gathering(model, TABLES):
        gathered = loss(model, batch)
        gathered.backward()
    torch.testing.assert_close(gathered, plain)
    assert all(parameters[name].grad is None for name in TABLES)
    assert {name for name, p in parameters.items() if p.grad is not None} == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(parameters[name].grad, gradient)


def test_the_model_is_put_back_after_an_error():
    model = Mixed()
    before = dict(model.named_parameters())

    def fail():
        with gathering(model, TABLES):
            assert all(dict(model.named_parameters())[name] is not before[name] for name in TABLES)
            loss(model, {})

    with pytest.raises(KeyError):
        fail()
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_a_profile_times_steps_in_which_no_gradient_of_a_table_is_made(monkeypatch):
    seen = []

    def noted(model, batch, loss, paths, tables):
        seen.append(set(tables))
        return timed_step(model, batch, loss, paths, tables)

    monkeypatch.setattr("armillary.profiler.probe.timed_step", noted)
    profile(Mixed(), [batch_of(0, 1), batch_of(1, 1)], loss, workers=2)
    assert seen and all(tables == set(TABLES) for tables in seen)


def test_a_model_that_asks_more_of_a_table_than_its_rows_is_timed_as_it_is():
    model = Mixed()

    def odd(model, batch):
        return loss(model, batch) + model.soft.new_zeros(1).type_as(model.emb.weight).sum()

    timed = timed_step(model, batch_of(0, 1), odd, ["emb"], ["emb.weight"])
    assert set(timed) == {"emb", OUTSIDE} and all(p.grad is None for p in model.parameters())
    with pytest.raises(KeyError, match="ids"):
        timed_step(model, {}, loss, ["emb"], ["emb.weight"])
