"""The schedule: planned, simulated, trained and held to one process, on 2 workers and on 2 replicas of 2."""

import json

import pytest
import torch
from local_models import convolutions, images, loss
from typer.testing import CliRunner

import armillary
from armillary import local_losses
from armillary.cli.main import app
from armillary.facts.choice import Choice
from armillary.facts.plan import Plan
from armillary.facts.topology import Link, Topology
from armillary.planning.request import PlanRequest
from armillary.schedules.local_losses import local_losses as table
from armillary.schedules.registry import read
from armillary.schedules.schedule import parse
from armillary.session.decide import JobRequest
from armillary.session.prepared import prepared
from armillary.session.verify import verify_workload
from armillary.workloads.vision import SMALL, workload

CHOICE = "local_losses(stages=2{})"


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 4), (4, 3)])
def test_the_table_has_no_bubble_and_nothing_old(stages, micro_batches):
    made = table(stages, micro_batches)
    assert parse(str(made)) == made and made.stale_share == 0.0 and made.period == 2 * micro_batches
    for stage, row in enumerate(made.ticks):
        assert [one.start for one in row] == list(range(stage, stage + 2 * micro_batches))
        assert [one.kind for one in row] == ["F", "B"] * micro_batches


def test_it_is_planned_and_simulated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Topology(2, 1, Link(1e-4, 1e8), Link(1e-4, 1e8), 1 << 33).save("two.json")
    asked = ["vision", "--small", "--schedule", CHOICE.format(", micro_batches=2"), "--topology", "two.json"]
    drawn = CliRunner().invoke(app, ["plan", *asked, "--json"])
    played = CliRunner().invoke(app, ["simulate", *asked, "--workers", "2"])
    assert (drawn.exit_code, played.exit_code) == (0, 0), (drawn.stderr, played.stderr)
    plan = json.loads(drawn.stdout)["plan"]
    assert [one["objective"]["name"] for one in plan["stages"]] == ["own_loss", "whole_model"]
    assert {one["stage"]: one["departures"] for one in plan["groups"]} == {0: ["uncoupled"], 1: []}
    again = prepared(workload(**SMALL), JobRequest(plan=Plan.from_json(json.dumps(plan))), 2)
    assert {name for one in plan["groups"] for name in one["parameters"]} == {
        n for n, _ in again.model().named_parameters()
    }


def verified(rank, workers, more):
    request = JobRequest(PlanRequest(schedule=Choice.parse(CHOICE.format(more))))
    task = prepared(workload(**{**SMALL, "norm": "batch"}), request, workers)
    found = verify_workload(task, steps=4, request=request)
    trained = {one.parameter for one in found.differences if one.is_trained and one.verdict == "equal"}
    assert {"0.head.0.weight", "0.head.7.bias"} <= trained, "heads learn"
    return found.tolerance, [one.parameter for one in found.differences if one.verdict not in ("equal", "no gradient")]


def test_two_workers_and_two_replicas_train_as_one_process_does(crew):
    for more in (", micro_batches=3", ", recompute=[0], clip_norm=0.5, clip_by=stage"):
        assert crew(2).run(verified, more) == [(0.0, [])] * 2
    assert crew(4).run(verified, ", micro_batches=2") == [(0.0, [])] * 4


def pipelined(rank, world):
    """The pipeline of the user's own split, under the face; then the model without heads."""
    local = local_losses.split(convolutions(dropout=0.0).double(), loss, doubled(images(0)), at=["5"])
    optimizer = torch.optim.SGD(local.parameters(), 0.1)
    schedule = Choice("local_losses", {"stages": 2, "micro_batches": 2})
    with armillary.parallelize(
        local, optimizer, [doubled(images(0)), doubled(images(1))], loss, schedule=schedule
    ) as run:
        for step in range(4):
            run.step([doubled(images(2 * step)), doubled(images(2 * step + 1))])
    return [tensor.clone() for tensor in local.plain().state_dict().values()]


def doubled(batch):
    return batch[0].double(), batch[1]


def test_the_pipeline_of_a_split_model_learns_as_its_loss_does(crew):
    """Without dropout, which a schedule seeds by stage, the pipeline is `local.loss` over the same micro-batches."""
    found = crew(2).run(pipelined)
    local = local_losses.split(convolutions(dropout=0.0).double(), loss, doubled(images(0)), at=["5"])
    optimizer = torch.optim.SGD(local.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        for number in (2 * step, 2 * step + 1):
            (local.loss(doubled(images(number))) / 2).backward()
        optimizer.step()
    for mine in found:
        for one, other in zip(mine, local.plain().state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


REFUSED = {
    "local_losses(stages=1)": "local_losses with one stage is backpropagation",
    "local_losses(stages=2, clip_norm=1.0)": "clips stage by stage, since no stage waits .* Pass clip_by=stage",
    "local_losses(stages=2, clip_norm=1.0, clip_by=previous)": "Pass clip_by=stage",
    "local_losses(stages=3)": "carries out two stages, got 3; take stages=2",
    "local_losses(stages=2, reach=2)": "local_losses has no reach",
}


@pytest.mark.parametrize("choice", REFUSED)
def test_options_are_refused_before_anything_runs(choice):
    with pytest.raises(ValueError, match=REFUSED[choice]):
        read(Choice.parse(choice), 6).schedule()


def test_a_model_without_heads_is_refused_before_the_first_step():
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = read(Choice.parse("local_losses(stages=2)"), 2)
    with pytest.raises(ValueError, match=r"train armillary.local_losses.split\(model, loss, example, at="):
        options.method.refuse_stages(options, [model[:5], model[5:]])
    three = list(local_losses.split(model, loss, images(0), at=["3", "5"]))
    with pytest.raises(ValueError, match="with 1 cuts for stages=2"):
        options.method.refuse_stages(options, [torch.nn.Sequential(*three[:2]), three[2]])
    assert optimizer.param_groups
