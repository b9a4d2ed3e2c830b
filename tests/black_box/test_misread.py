"""What is written wrongly in a plan, a wish or a checkpoint is named in one sentence, with how it is written."""

import json

import numpy as np
import pytest
import torch
from small_models import OPTIMIZERS, Reader, made, word_batch, word_loss
from test_errors import said_by

import armillary
import face


def words_plan(workers=2, **asked):
    return face.plan_for(made(Reader), word_loss, [word_batch(n, 0) for n in range(workers)], workers, **asked)


def changed(change):
    """The text of a plan that somebody has edited."""
    given = json.loads(words_plan().to_json())
    change(given)
    return json.dumps(given)


PLANS = {
    "without groups": (lambda given: given.pop("groups"), "plan: plan lacks groups"),
    "without mesh": (lambda given: given.pop("mesh"), "plan: plan lacks mesh"),
    "mesh as a number": (lambda given: given.update(mesh=2), r"mesh is 2; want the ranks along each axis.*\"data\": 2"),
    "groups by name": (lambda given: given.update(groups={}), "groups is a dict; want a list"),
    "a group without parameters": (lambda given: given["groups"][0].pop("parameters"), "group '.*' lacks parameters"),
    "a group as a text": (lambda given: given.update(groups=["bucket"]), "a group is 'bucket'; want an object with"),
    "an exchange as a text": (
        lambda given: given["groups"][0].update(exchange="all_reduce"),
        "a choice is 'all_reduce'; want an object with name, options",
    ),
    "a schedule without name": (lambda given: given.update(schedule={}), "choice '' lacks name"),
}


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_that_was_edited_wrongly_says_where(kind):
    change, words = PLANS[kind]
    with pytest.raises(ValueError, match=words):
        armillary.Plan.from_json(changed(change))


def attached(rank, world, text):
    model = made(Reader)
    plan = armillary.Plan.from_json(text)
    return said_by(lambda: face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss))


def test_a_plan_with_an_exchange_that_there_is_not_or_for_other_workers_is_refused(crew):
    text = changed(lambda given: given["groups"][0]["exchange"].update(name="all_redcue"))
    for said in crew(2).run(attached, text):
        assert "'all_redcue'" in said and "all_reduce" in said
    for said in crew(2).run(attached, words_plan(3, per_node=3).to_json()):
        assert "the plan is for 3 workers, this job has 2" in said and "--nproc-per-node 3" in said


WISHES = {
    "a parameter almost": ({"exchange": {"words.wieght": "row_sharded"}}, "did you mean 'words.weight'"),
    "no parameter": ({"exchange": {"zzz": "row_sharded"}}, r"there are words.weight, .*bias$"),
    "a layout almost": ({"exchange": {"words.weight": "row_shraded"}}, "did you mean 'row_sharded'"),
    "no layout": ({"exchange": {"words.weight": 3}}, "no layout and no exchange; there are replicated"),
    "constraints as a text": ({"exchange": "words.weight"}, r"want a mapping.*\{'emb.weight': 'row_sharded'\}"),
    "lazy as a text": ({"lazy": "words.weight"}, r"lazy is the text.*write \['words.weight'\]"),
}


@pytest.mark.parametrize("kind", WISHES)
def test_a_wish_that_names_nothing_says_what_was_meant(kind):
    asked, words = WISHES[kind]
    with pytest.raises(ValueError, match=words):
        words_plan(**asked)


def wished_of_parallelize(rank, world):
    model = made(Reader)
    batches, optimizer = [word_batch(n, 0) for n in range(world)], OPTIMIZERS["sgd"](model.parameters())
    wishes = [{"lazy": "words.weight"}, {"constraints": "words.weight"}, {"schedule": "ring(slack"}]
    return [said_by(lambda: face.parallelize(model, optimizer, batches, word_loss, **wish)) for wish in wishes]  # noqa: B023


def test_the_same_wishes_are_refused_by_parallelize(crew):
    for lazy, constraints, schedule in crew(2).run(wished_of_parallelize):
        assert "write ['words.weight']" in lazy and "want a mapping" in constraints
        assert "'ring(slack' is no NAME or NAME(OPTION=VALUE, ...)" in schedule


def test_links_as_numbers_are_refused():
    with pytest.raises(ValueError, match=r"inside is 1e\+09; want armillary.Link\(|inside is 1000000000.0; want"):
        armillary.Topology(2, 1, 1e9, 1e10, 1 << 33)


def saved(rank, world, plan, folder):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    said = [
        said_by(lambda: face.save(run, folder, loop))  # noqa: B023
        for loop in (
            {"step": 1, "rng": np.random.get_state()},
            {"inner": {"list": [1, np.random.default_rng(0)]}},
            {"call": lambda: 1},
            3,
        )
    ]
    path = face.save(run, folder, {"rng": torch.get_rng_state(), "order": [1, 2]})
    found = face.load(run, path)
    face.close(run)
    return said, found["order"]


def test_what_a_loop_saves_and_cannot_be_loaded_is_named_by_its_key(crew, tmp_path):
    for rank, (said, order) in enumerate(crew(2).run(saved, words_plan(), str(tmp_path))):
        state, generator, function, number = said
        assert "loop['rng'][1] is a numpy.ndarray" in state and "rank 0" in state and "\x1b" not in state
        assert "loop['inner']['list'][1] is a numpy.random" in generator
        assert "loop['call'] is a builtins.function" in function
        assert "loop is a int; want a mapping" in number
        assert order == [1, 2], rank


def test_a_layout_that_there_is_not_is_refused_in_one_line_before_the_first_step():
    model = made(Reader)
    said = said_by(
        lambda: armillary.parallelize(model, OPTIMIZERS["sgd"](model.parameters()), constraints={"*": "row_shraded"})
    )
    assert "did you mean 'row_sharded'" in said, said
