"""Checkpoint folders of format 1 open under every plan: one of a user's loop with a table, one of a pipeline."""

import json
from pathlib import Path

import pytest
import torch

import armillary
from armillary.planning.planner import plan
from armillary.plans import Choice, Link, Topology
from armillary.profiler.profiler import profile
from small_words import batch_of, loss, model_of, optimizer_of

FOLDERS = Path(__file__).parents[1] / "fixtures" / "format_1"


def plan_of(schedule, workers, constraints):
    link = Link(1e-4, 1e8)
    facts = profile(model_of(), [batch_of(0, worker) for worker in range(workers)], loss, workers=workers)
    return plan(facts, Topology(1, workers, link, link, 1 << 33), schedule=Choice(schedule), constraints=constraints)


def open_folder(rank, world, folder, made, again):
    model = model_of()
    with armillary.attach(made, model, optimizer_of(model), loss=loss, example=batch_of(0, 0)) as run:
        loop = run.load(FOLDERS / folder / "step-00000003")
        whole = run.export()
        path = run.save(again)
    return whole, loop, json.loads((path / "complete.json").read_text())


@pytest.mark.parametrize(
    ("schedule", "workers", "constraints"),
    [("simultaneous", 2, {"0.weight": "row_sharded"}), ("simultaneous", 1, {}), ("pipeline", 2, {}), ("ring", 2, {})],
)
@pytest.mark.parametrize("folder", ["hybrid", "cyclic"])
def test_a_folder_of_format_1_opens(crew, tmp_path, folder, schedule, workers, constraints):
    made = plan_of(schedule, workers, constraints)
    whole, loop, marker = crew(workers).run(open_folder, folder, made, str(tmp_path))[0]
    true = torch.load(FOLDERS / folder / "exported.pt", weights_only=True)
    for key, value in true["model"].items():
        assert torch.equal(whole["model"][key], value), key
    for number, entries in true["optimizer"]["state"].items():
        for entry, value in entries.items():
            assert torch.equal(whole["optimizer"]["state"][number][entry], value), (number, entry)
    assert loop["step"] == 3
    assert (marker["format"], marker["step"]) == (2, 3)
    assert marker["plan"] == json.loads(made.to_json()) and marker["plan"]["mesh"]
    assert marker["departures"] == list(made.departures)
