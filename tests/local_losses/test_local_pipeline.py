"""The schedule: planned, simulated, trained and held to one process, on 2 to 4 stages and on 2 replicas of 2."""

import copy
import json
import os
import re
import signal

import pytest
import torch
from local_models import convolutions, images, loss
from torch import nn
from typer.testing import CliRunner

import armillary
from armillary import local_losses
from armillary.cli.main import app
from armillary.planning.request import PlanRequest
from armillary.plans import Choice, Link, Plan, Topology
from armillary.schedules import read
from armillary.schedules.local_losses import local_losses as table
from armillary.session.plan_job import JobRequest, prepared
from armillary.session.verify import verify_workload
from armillary.workloads.vision import SMALL, workload
from forked import Job
from schedule_pictures import parse

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


def verified(rank, workers, choice):
    request = JobRequest(PlanRequest(schedule=Choice.parse(choice)))
    task = prepared(workload(**{**SMALL, "norm": "batch"}), request, workers)
    found = verify_workload(task, steps=3, request=request)
    trained = {one.parameter for one in found.differences if one.is_trained and one.verdict == "equal"}
    assert any(".head." in name for name in trained), "heads learn"
    return found.tolerance, [one.parameter for one in found.differences if one.verdict not in ("equal", "no gradient")]


@pytest.mark.parametrize(
    ("workers", "choice"),
    [
        (2, "local_losses(stages=2, micro_batches=3)"),
        (3, "local_losses(stages=3, micro_batches=1)"),
        (3, "local_losses(stages=3, micro_batches=5, recompute=[1], clip_norm=0.5, clip_by=stage)"),
        (4, "local_losses(stages=2, micro_batches=2)"),
        (4, "local_losses(stages=4, micro_batches=2, head=linear, objective=task)"),
    ],
)
def test_stages_and_replicas_train_as_one_process_does(crew, workers, choice):
    assert crew(workers).run(verified, choice) == [(0.0, [])] * workers


CUTS = ["3", "5", "8"]  # where 4 stages begin; fewer have fewer of them
SEEDS = range(4)  # of steps
SAVED = 2  # steps, after which another run goes on


def made(stages):
    local = local_losses.split(convolutions(dropout=0.0).double(), loss, doubled(images(0)), at=CUTS[: stages - 1])
    return local, torch.optim.SGD(local.parameters(), 0.1, momentum=0.9)


def given(step):
    return [doubled(images(2 * step)), doubled(images(2 * step + 1))]


def doubled(batch):
    return batch[0].double(), batch[1]


def pipelined(rank, world, folder):
    """The pipeline of the user's own split, under the face, saved half way and gone on with by another run."""
    schedule, found = Choice("local_losses", {"stages": world, "micro_batches": 2}), []
    for part in (SEEDS[:SAVED], SEEDS[SAVED:]):
        local, optimizer = made(world)
        with armillary.parallelize(local, optimizer, [given(0)[0]] * world, loss, schedule=schedule) as run:
            if part[0]:
                run.load(armillary.latest_checkpoint(folder))
            for step in part:
                found += run.step(given(step))
            if not part[0]:
                run.save(folder)
            found += run.close()
    return [tensor.clone() for tensor in local.plain().state_dict().values()], [
        [float(loss) for loss in one.losses] for one in found
    ]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_pipeline_of_a_split_model_learns_as_its_loss_does(crew, tmp_path, stages):
    """Without dropout, which a schedule seeds by stage, the pipeline is `local.loss` over the same micro-batches."""
    found = crew(stages).run(pipelined, tmp_path)
    local, optimizer = made(stages)
    losses = []
    for step in SEEDS:
        optimizer.zero_grad()
        losses.append([float(loss(copy.deepcopy(local.plain()), batch).detach()) for batch in given(step)])
        for batch in given(step):
            (local.loss(batch) / 2).backward()
        optimizer.step()
    for mine, told in found:
        for one, other in zip(mine, local.plain().state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.tensor(told), torch.tensor(losses), rtol=0, atol=1e-12)


def killed(rank, ranks, who):
    """Rank `who` is killed in its fourth step."""
    torch.distributed.init_process_group("gloo")
    local, optimizer = made(ranks)
    schedule = Choice("local_losses", {"stages": ranks, "micro_batches": 2})
    patience = {"report_after": 1.0, "timeout": 4.0}
    run = armillary.parallelize(local, optimizer, [given(0)[0]] * ranks, loss, schedule=schedule, **patience)
    for step in range(40):
        if (rank, step) == (who, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(given(step))


def test_a_killed_rank_is_named_by_all_others():
    for who, job in [(who, Job(3, killed, who)) for who in (1, 2)]:
        for rank, one in enumerate(job.ended()):
            if rank != who:
                assert one.code == 1 and f"rank {who}: no sign of life" in one.err, one


REFUSED = {
    "local_losses(stages=1)": "local_losses with one stage is backpropagation",
    "local_losses(stages=2, clip_norm=1.0)": "clips stage by stage, since no stage waits .* Pass clip_by=stage",
    "local_losses(stages=2, clip_norm=1.0, clip_by=previous)": "Pass clip_by=stage",
    "local_losses(stages=2, reach=2)": "local_losses has no reach",
}


@pytest.mark.parametrize("choice", REFUSED)
def test_options_are_refused_before_anything_runs(choice):
    with pytest.raises(ValueError, match=REFUSED[choice]):
        read(Choice.parse(choice), 6).schedule()


def test_a_model_without_heads_is_refused_before_the_first_step():
    model = convolutions()
    options = read(Choice.parse("local_losses(stages=2)"), 2)
    with pytest.raises(ValueError, match=r"train armillary.local_losses.split\(model, loss, example, at="):
        options.method.objectives.refuse_stages(options, [model[:5], model[5:]])
    three = list(local_losses.split(model, loss, images(0), at=["3", "5"]))
    with pytest.raises(ValueError, match="with 1 cuts for stages=2"):
        options.method.objectives.refuse_stages(options, [torch.nn.Sequential(*three[:2]), three[2]])


@pytest.mark.parametrize(
    ("choice", "split", "said"),
    [
        ("local_losses(head=linear)", {}, "was split with head=None; drop it here, and give split(..., head='linear')"),
        ("local_losses(head=convolution)", {"head": "linear"}, "split with head=linear"),
        ("local_losses(objective=infopro)", {}, "was split with objective=task"),
        ("local_losses", {"reach": 2}, "split with reach=2; take reach=1, or train split(...).loss"),
    ],
)
def test_a_model_that_was_split_otherwise_is_refused_before_the_first_step(choice, split, said):
    options = read(Choice.parse(choice), 2)
    with pytest.raises(ValueError, match=re.escape(said)):
        options.method.objectives.refuse_stages(
            options, list(local_losses.split(convolutions(), loss, images(0), at=["5"], **split))
        )


NESTED = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU()), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("choice", "parts", "first"),
    [
        ("local_losses(points=['5'])", ["0", "5"], nn.Conv2d),
        ("local_losses(stages=2, head=linear)", ["0", "4"], nn.AdaptiveAvgPool2d),
        ("local_losses(points=['2', '5'], objective=infopro)", ["0", "2", "5"], nn.Conv2d),
    ],
)
def test_a_plain_model_gets_the_parts_and_heads_that_the_options_name(choice, parts, first):
    options = read(Choice.parse(choice), len(parts))
    local = options.method.objectives.prepare(options, convolutions(), loss, images(0))
    assert [name for name, _ in local.named_children()] == parts
    assert {type(part.head[0]) for part in list(local)[:-1]} == {first}
    assert {part.decoder is None for part in list(local)[:-1]} == {options.objective != "infopro"}


def test_points_are_the_names_of_parts():
    for points, said in (("['0.1']", r"names parts without dots; take points=\['0_1'\]"), ("['0_2']", "")):
        options = read(Choice.parse(f"local_losses(points={points})"), 2)
        if said:
            with pytest.raises(ValueError, match=said):
                options.method.objectives.prepare(options, NESTED, loss, images(0))
        else:
            assert [*options.method.objectives.prepare(options, NESTED, loss, images(0))._modules] == ["0_0", "0_2"]


def test_options_of_heads_stand_in_a_plan():
    options = read(Choice.parse("local_losses(stages=3, head=linear, objective=task)"), 3)
    assert options.as_options() == {"micro_batches": 3, "head": "linear", "objective": "task"}
    wide = read(Choice.parse("local_losses(stages=2, head=wide)"), 2)
    with pytest.raises(ValueError, match="head is 'linear' or 'convolution', or modules, got 'wide'"):
        wide.method.objectives.prepare(wide, convolutions(), loss, images(0))
