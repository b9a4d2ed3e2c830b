"""Schedules that own the loop keep tables whole: what older plans and checkpoints with tables by row become under them.

The fixtures are of a time when a pipeline and accumulation could spread a table's rows: a plan of each, what it had
learnt after three steps on two workers, and the checkpoint.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import armillary
from armillary.planning.planner import plan
from armillary.plans import SIMULTANEOUS, Choice, Link, Plan, Topology
from armillary.profiler.profiler import profile
from armillary.schedules import SCHEDULES, owns_loop
from small_words import batch_of, loss, model_of, optimizer_of

FOLDERS = Path(__file__).parents[1] / "fixtures" / "by_row_under_schedules"
TABLE = "0.weight"
BY_ROW = {TABLE: "row_sharded"}
OWNING = [name for name, method in SCHEDULES.all().items() if method.owns_loop and not method.placement.deals_rows]
ACCUMULATES = "in a loop of your own, which accumulates under run.no_sync"


def facts_of(workers):
    return profile(model_of(), [batch_of(0, worker) for worker in range(workers)], loss, workers=workers)


def plan_of(schedule, workers=2, **asked):
    link = Link(1e-4, 1e8)
    return plan(facts_of(workers), Topology(1, workers, link, link, 1 << 33), schedule=schedule, **asked)


def old_plan(name):
    return Plan.from_json((FOLDERS / name / "plan.json").read_text())


# Plans


def attached(rank, world, made):
    model = model_of()
    with pytest.raises(ValueError, match="keeps tables whole") as refused:
        armillary.attach(made, model, optimizer_of(model), loss=loss, example=batch_of(0, 0))
    assert model[0].weight.shape == (11, 4)  # nothing was touched
    return str(refused.value)


@pytest.mark.parametrize("name", ["pipeline", "accumulation"])
def test_an_old_plan_is_read_and_refused_in_one_sentence_that_names_what_helps(crew, name):
    made = old_plan(name)
    assert made.group_of(TABLE).layout == "row_sharded" and "row_sharded" in str(made)
    for said in crew(2).run(attached, made):
        assert said == (
            f"plan: schedule {name} keeps tables whole, so 0.weight cannot go by row: plan again without that "
            "constraint, or without a schedule, where tables go by row "
            + (ACCUMULATES if name == "accumulation" else "in a loop of your own")
        )


@pytest.mark.parametrize("name", ["pipeline", "accumulation"])
def test_an_old_plan_is_not_played_either(name):
    with pytest.raises(ValueError, match=f"schedule {name} keeps tables whole"):
        armillary.simulate(old_plan(name), facts_of(2), Topology(1, 2, Link(1e-4, 1e8), Link(1e-4, 1e8), 1 << 33))


def test_a_plan_edited_to_gather_rows_is_refused_too(crew):
    made = plan_of("gpipe")
    first = replace(made.groups[0], parameters=(TABLE,), exchange=Choice("gather_rows"))
    rest = replace(made.groups[0], name="rest", parameters=tuple(p for p in made.groups[0].parameters if p != TABLE))
    for said in crew(2).run(attached, replace(made, groups=(first, rest, *made.groups[1:]))):
        assert "goes by gather_rows; schedule gpipe keeps tables whole, so 0.weight cannot go by row" in said


# What is asked for


@pytest.mark.parametrize("name", OWNING)
@pytest.mark.parametrize("wish", ["row_sharded", "owned_rows", "gather_rows"])
def test_a_schedule_beside_a_row_exchange_by_name_is_refused_with_the_remedy(name, wish):
    with pytest.raises(ValueError, match="without a schedule") as refused:
        plan_of(name, constraints={TABLE: wish})
    if SCHEDULES[name].is_cut:
        assert f"{TABLE!r} is to be {wish}, but schedule {name} keeps tables whole" in str(refused.value)
    assert (ACCUMULATES in str(refused.value)) == (name in ("accumulation", "one_device"))
    assert plan_of(SIMULTANEOUS, constraints={TABLE: wish}).group_of(TABLE).exchange.name != "all_reduce"  # it helps


@pytest.mark.parametrize("name", [name for name in OWNING if SCHEDULES[name].is_cut])
def test_left_to_the_price_tables_are_whole_and_the_note_says_so(name):
    workers = 3 if name == "shared_stages" else 2
    made = plan_of(name, workers)
    assert all(group.layout != "row_sharded" for group in made.groups)
    assert f"a schedule keeps tables whole: {TABLE}; without one they may go by row" in made.notes
    with pytest.raises(ValueError, match=f"{TABLE} cannot be lazy, since schedule {name} keeps tables whole"):
        plan_of(name, workers, lazy=[TABLE])


def test_a_pipeline_that_is_taken_by_price_says_so_too():
    slow, facts = Link(1e-4, 1e6), facts_of(2)
    stages = [replace(stage, forward_seconds=0.01, backward_seconds=0.02) for stage in facts.stages]
    wide = [replace(one, bytes=one.bytes << 16, shape=(one.shape[0], *(n << 16 for n in one.shape[1:])))
            if one.name == "1.weight" else one for one in facts.parameters]  # fmt: skip
    heavy = replace(facts, stages=tuple(stages), parameters=tuple(wide))
    made = plan(heavy, Topology(2, 1, slow, slow, 1 << 33), steps_by_run=True, micro_batches=8)
    assert owns_loop(made.schedule) and all(group.layout != "row_sharded" for group in made.groups)
    assert f"a schedule keeps tables whole: {TABLE}; without one they may go by row" in made.notes


# Checkpoints


def opened(rank, world, name, made):
    model = model_of()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with armillary.attach(made, model, optimizer_of(model), loss=loss, example=batch_of(0, 0)) as run:
        loop = run.load(FOLDERS / name / "step-00000003")
        whole = run.export()
        if owns_loop(made.schedule):
            run.step([batch_of(3, number) for number in run._engine.micro_batches])
    return whole, loop


@pytest.mark.parametrize(
    ("schedule", "workers", "asked"),
    [("pipeline", 2, {}), ("accumulation", 2, {}), (SIMULTANEOUS, 2, {"constraints": BY_ROW}), (SIMULTANEOUS, 1, {})],
)
@pytest.mark.parametrize("name", ["pipeline", "accumulation"])
def test_an_old_checkpoint_opens_under_a_new_plan(crew, name, schedule, workers, asked):
    whole, loop = crew(workers).run(opened, name, plan_of(schedule, workers, **asked))[0]
    true = torch.load(FOLDERS / name / "exported.pt", weights_only=True)
    assert loop["step"] == 3 and whole["model"].keys() == true["model"].keys()
    for key, value in true["model"].items():
        assert torch.equal(whole["model"][key], value), key
    for number, entries in true["optimizer"]["state"].items():
        for entry, value in entries.items():
            assert torch.equal(whole["optimizer"]["state"][number][entry], value), (number, entry)
