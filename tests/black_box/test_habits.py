"""Habits of a user's loop beside a spread table: hooks, a group added, a layer unfrozen, a new optimizer."""

import pytest
import torch
from plain_loop import differ, state_of
from small_models import Reader, made, word_batch, word_loss

import armillary

STEPS, MIDWAY, HEAD = 6, 3, "layers.3"


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def nothing(model, optimizer):
    return optimizer


def adds_a_group(model, optimizer):
    optimizer.add_param_group({"params": list(model.get_submodule(HEAD).parameters()), "lr": 0.05})
    return optimizer


def unfreezes(model, optimizer):
    model.get_submodule(HEAD).requires_grad_(True)
    return adds_a_group(model, optimizer)


def hooks_a_gradient(model, optimizer):
    """Of a dense parameter, with a tensor hook, as the loop goes on."""
    model.get_submodule(HEAD).weight.register_hook(lambda gradient: gradient * 3)
    return optimizer


def makes_another(model, optimizer):
    return momentum(model.parameters())


def looped(habit, ranks, begin=lambda model, optimizer: None):
    """Model, optimizer and the shapes that hooks saw, after a loop over these ranks' batches."""
    model, seen = made(Reader), []
    model.words.register_forward_pre_hook(lambda module, given: seen.append(("in", given[0].shape)))
    model.words.register_forward_hook(lambda module, given, rows: seen.append(("out", rows.shape)))
    model.get_submodule(HEAD).requires_grad_(habit is not unfreezes)
    begun = [p for n, p in model.named_parameters() if habit not in (adds_a_group, unfreezes) or not n.startswith(HEAD)]
    optimizer = momentum(begun)
    run = begin(model, optimizer)
    for step in range(STEPS):
        if step == MIDWAY:
            optimizer = habit(model, optimizer)
        optimizer.zero_grad()
        for rank in ranks:
            (word_loss(model, word_batch(rank, step)) / len(ranks)).backward()
        optimizer.step()
    if run is not None:
        run.close()
    return state_of(model), seen


def begun(model, optimizer):
    return armillary.parallelize(model, optimizer, constraints={"words.weight": "row_sharded"})


def on_a_rank(rank, world, habit):
    try:
        return looped(habit, [rank], begun)
    except (ValueError, NotImplementedError) as error:
        return str(error)


@pytest.mark.parametrize("habit", [nothing, adds_a_group, hooks_a_gradient])
def test_hooks_of_a_spread_tables_module_and_a_group_or_hook_added_midway_do_as_in_one_process(crew, habit):
    want, shapes = looped(habit, [0, 1])
    assert habit is nothing or differ(looped(nothing, [0, 1])[0], want, 1e-6), "the habit changes nothing"
    for state, seen in crew(2).run(on_a_rank, habit):
        assert differ(state, want, 1e-10) == {}
        assert seen == shapes[:2] * STEPS


REFUSED = {
    unfreezes: "layers.3.weight (3, 5) has a gradient but is not in the plan (unfrozen after attach?); call run",
    makes_another: "If an optimizer asks that was made since the run began: the run steps only those it was given",
}


@pytest.mark.parametrize("habit", REFUSED)
def test_a_layer_unfrozen_midway_and_a_new_optimizer_are_refused_with_the_remedy(crew, habit):
    for said in crew(2).run(on_a_rank, habit):
        assert REFUSED[habit] in said, said
