"""A plan can be read by people and by programs: its text says what is not exact, its file is the plan."""

import dataclasses
import json

import pytest
from plain_loop import apart
from small_models import OPTIMIZERS, Reader, Tied, chain, made, pair_batch, pair_loss, word_batch, word_loss

import armillary
import face

TABLE = "words.weight"
SCHEDULES = {
    "one_device(micro_batches=2)": 1,
    "pipeline": 2,
    "ring(slack=1)": 2,
    "zero_ring": 2,
    "shared_stages": 3,
    "delayed_all_reduce": 2,
}
EXACT = {
    "gpipe(micro_batches=3)": 2,
    "one_f_one_b(micro_batches=3)": 2,
    "accumulation(micro_batches=3)": 1,
}


def words_plan(workers=2, kind=Reader, **asked):
    return face.plan_for(made(kind), word_loss, [word_batch(worker, 0) for worker in range(workers)], workers, **asked)


def chain_plan(text, processes):
    batches = [pair_batch(0, number) for number in range(processes)]
    return face.plan_for(chain(), pair_loss, batches, processes, schedule=text)


def every_plan():
    exchanges = ("all_reduce", "gather_rows", "owned_rows", "owned_rows_by_node")
    plans = [words_plan(exchange={TABLE: name}) for name in exchanges]
    plans += [words_plan(mean="weights"), words_plan(lazy=[TABLE]), words_plan(kind=Tied)]
    return plans + [chain_plan(text, processes) for text, processes in {**SCHEDULES, **EXACT}.items()]


def test_a_plan_goes_to_a_file_and_back_and_prints_the_same(tmp_path):
    for number, plan in enumerate(every_plan()):
        path = tmp_path / f"{number}.json"
        plan.save(path)
        back = armillary.Plan.load(path)
        assert back.to_json() == plan.to_json() and str(back) == str(plan)
        json.loads(path.read_text())


def carried_out(rank, world, plan):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["adagrad"](model.parameters()), word_loss)
    for step in range(3):
        face.step(run, [word_batch(rank, step)])
    got = face.weights(run)
    face.close(run)
    return got


def test_a_plan_from_a_file_is_carried_out_as_the_one_that_was_written(crew, tmp_path):
    plan = words_plan(exchange={TABLE: "owned_rows"})
    plan.save(tmp_path / "plan.json")
    loaded = armillary.Plan.load(tmp_path / "plan.json")
    for one, other in zip(crew(2).run(carried_out, plan), crew(2).run(carried_out, loaded), strict=True):
        assert apart(one, other) == {}


def test_the_text_names_every_group_with_its_exchange_and_what_it_costs():
    plan = words_plan(exchange={TABLE: "owned_rows"})
    text = str(plan)
    for parameter, exchange in face.exchanges_of(plan).items():
        group = plan.group_of(parameter)
        (line,) = [line for line in text.splitlines() if line.startswith(group.name) and group.exchange.name in line]
        assert exchange in line
    assert "2 workers" in text and "mean over workers" in text
    assert "NOT exact" not in text
    assert "the sum of declared weights" in str(words_plan(mean="weights"))


@pytest.mark.parametrize("text", SCHEDULES)
def test_a_schedule_that_reads_old_weights_says_so(text):
    plan = chain_plan(text, SCHEDULES[text])
    said = str(plan)
    assert f"schedule {text.removesuffix(')')}" in said and "NOT exact" in said and "step old" in said
    assert face.departures_of(plan) == {"stale"}


@pytest.mark.parametrize("text", EXACT)
def test_a_schedule_that_reads_the_newest_weights_says_that_it_is_exact(text):
    plan = chain_plan(text, EXACT[text])
    assert f"schedule {text}" in str(plan) and "NOT exact" not in str(plan) and face.departures_of(plan) == set()


def test_rows_that_stay_put_are_printed_as_not_exact():
    assert "NOT exact: rows without gradient stay put" in str(words_plan(exchange={TABLE: "owned_rows"}, lazy=[TABLE]))


def test_nothing_that_is_not_exact_is_taken_by_price():
    for workers in (1, 2, 8):
        for per_node in (0, 1):
            plan = words_plan(workers, per_node=per_node)
            said = [line for line in str(plan).splitlines() if "NOT exact" in line]
            assert face.departures_of(plan) == set() and all("quicker way: " in line for line in said), said


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"exchange": {"word.weight": "owned_rows"}}, "'word.weight' names no parameter of the model; did you mean"),
        ({"exchange": {TABLE: "telepathy"}}, "'telepathy', which is no layout and no exchange; there are"),
        ({"exchange": {"layers.0.weight": "owned_rows"}}, "'layers.0.weight' cannot be owned_rows"),
        ({"kind": Tied, "exchange": {TABLE: "row_sharded"}}, "'words.weight' cannot be row_sharded"),
        ({"lazy": ["layer.0.weight"]}, "'layer.0.weight' names no parameter of the model; did you mean"),
        ({"schedule": "spiral"}, "spiral"),
    ],
)
def test_a_wish_that_cannot_be_granted_is_refused_with_the_name_and_what_there_is(asked, complaint):
    with pytest.raises(ValueError, match=complaint):
        words_plan(**asked)


def refused_start(rank, world, plans):
    """What is said of each plan, and whether the model is as it was."""
    said = []
    for plan in plans:
        model = made(Reader)
        before = [(name, id(parameter)) for name, parameter in model.named_parameters()]
        try:
            face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
        except ValueError as error:
            said.append((str(error), before == [(name, id(one)) for name, one in model.named_parameters()]))
    return said


def test_a_plan_for_another_job_or_model_is_refused_on_every_rank_and_the_model_stays(crew):
    plan = words_plan()
    plans = [words_plan(4, per_node=1), words_plan(kind=Tied), dataclasses.replace(plan, groups=plan.groups[1:])]
    for answers in crew(2).run(refused_start, plans):
        workers, model, missing = (said for said, _ in answers)
        assert "the plan is for 4 workers, this job has 2" in workers
        assert "made for another model" in model or "another model" in model
        assert all(name in missing for name in plan.groups[0].parameters)
        assert all(is_as_before for _, is_as_before in answers)


def start_with_different_plans(rank, world, plans):
    model = made(Reader)
    try:
        face.start(plans[rank], model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_ranks_with_different_plans_are_told_who_differs(crew):
    plans = [words_plan(exchange={TABLE: name}) for name in ("owned_rows", "gather_rows")]
    for said in crew(2).run(start_with_different_plans, plans):
        assert "rank" in said and "plan" in said
