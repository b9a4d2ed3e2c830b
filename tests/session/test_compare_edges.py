"""A run under a schedule beside its forecast, edge by edge: bytes as played, a wrong edge found."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from armillary.cli.main import app
from armillary.cli.names import UNEQUAL
from armillary.planning.request import PlanRequest
from armillary.plans import Choice, Plan, Profile
from armillary.plans.group import Band
from armillary.plans.units import WIDTH
from armillary.session.compare import compare_run
from armillary.session.plan_job import JobRequest
from armillary.session.traffic_meter import OTHER, STEP
from armillary.session.train import train
from armillary.session.train_settings import Settings
from contracts.journey import of_few_tensors

BYTES = Band(memory_bytes=1, seconds=1)  # what a busy machine cannot change
PIPELINES = {
    "pipeline(micro_batches=4)": 2,
    "gpipe(micro_batches=4)": 2,
    "one_f_one_b(micro_batches=2, stages=2)": 4,
}
EDGES = ["activation of stage 0", "activation gradient of stage 1"]


def trained(rank, workers, text, folder, steps=5):
    settings = Settings(
        Path(folder), steps=steps, every_seconds=0, request=JobRequest(PlanRequest(schedule=Choice.parse(text)))
    )
    for _ in train(of_few_tensors(), settings):
        pass


def outside(folder):
    return {line.group: line.outside for line in compare_run(folder, BYTES).lines if line.outside}


def asked(folder):
    """What the command says, and its exit code."""
    done = CliRunner().invoke(app, ["compare", str(folder), "--memory", "1", "--seconds", "1"])
    return done.stdout, done.exit_code


def a_tenth_more_in_the_plan(folder):
    """Of the bytes of its first group."""
    plan = Plan.load(folder / "plan.json")
    group = plan.groups[0]
    more = replace(group.forecast, sent_bytes=1.1 * group.forecast.sent_bytes)
    plan.with_group(replace(group, forecast=more)).save(folder / "plan.json")
    return group.name


def a_tenth_more_at_the_cut(folder):
    """Of the bytes that the profile says stage 0 hands on."""
    profile, plan = Profile.load(folder / "profile.json"), Plan.load(folder / "plan.json")
    names = [stage.name for stage in profile.stages]
    last = names.index(plan.stages[1].begins) - 1
    stages = list(profile.stages)
    stages[last] = replace(stages[last], output_bytes=round(1.1 * stages[last].output_bytes))
    replace(profile, stages=tuple(stages)).save(folder / "profile.json")


@pytest.mark.parametrize(("text", "workers"), PIPELINES.items())
def test_every_group_and_edge_of_a_pipeline_has_a_line_and_wrong_bytes_are_found(crew, tmp_path, text, workers):
    crew(workers).run(trained, text, str(tmp_path))
    kept = json.loads((tmp_path / "summary.json").read_text())["comparison"]
    assert all(line["measured"]["seconds"] is not None for line in kept)
    found = compare_run(tmp_path, BYTES)
    assert found.is_within, [line for line in found.lines if line.outside]
    plan = Plan.load(tmp_path / "plan.json")
    assert [line.group for line in found.lines] == [
        *(group.name for group in plan.groups), *EDGES, OTHER, STEP, "process"
    ]  # fmt: skip
    for line in found.lines[len(plan.groups) :][: len(EDGES)]:
        assert line.measured.sent_bytes == pytest.approx(line.forecast.sent_bytes, rel=1e-9)
        assert line.measured.sent_bytes > 0 and line.measured.seconds > 0 and line.forecast.seconds > 0
    page, code = asked(tmp_path)
    assert code == 0 and max(map(len, page.splitlines())) <= WIDTH
    right = (tmp_path / "profile.json").read_text()
    a_tenth_more_at_the_cut(tmp_path)
    assert outside(tmp_path) == dict.fromkeys(EDGES, ("sent_bytes",))
    assert asked(tmp_path)[1] == UNEQUAL == 3
    (tmp_path / "profile.json").write_text(right)
    assert a_tenth_more_in_the_plan(tmp_path) in outside(tmp_path)


SUMS = {"partial gradient", "gradient", "weights"}
ON_THE_WAY = {
    "ring": SUMS,
    "zero_ring": {"partial gradient", "gradient", "forward weights", "backward weights"},
    "shared_stages": {*SUMS, "activation", "activation gradient"} - {"gradient"},  # sums are finished at their owners
}


@pytest.mark.parametrize("text", ON_THE_WAY)
def test_every_group_and_edge_of_stages_on_several_ranks_has_a_line_and_wrong_bytes_are_found(crew, tmp_path, text):
    steps = 40 if text == "zero_ring" else 6  # weights that are lent ahead at the end of a run are thrown away
    crew(3 if text == "shared_stages" else 2).run(trained, text, str(tmp_path), steps)
    found = compare_run(tmp_path, BYTES)
    assert found.is_within, [line for line in found.lines if line.outside]
    edges = [line for line in found.lines if line.exchange == "edge"]
    assert {line.group.split(" of ")[0] for line in edges} == ON_THE_WAY[text]
    for line in edges:
        assert line.measured.sent_bytes == pytest.approx(line.forecast.sent_bytes, rel=1e-9)
    assert a_tenth_more_in_the_plan(tmp_path) in outside(tmp_path)
