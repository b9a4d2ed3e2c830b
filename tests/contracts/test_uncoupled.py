"""Proof of the contracts: a pipeline with an edge that carries no gradient. One more schedule is one file."""

import json
from contextlib import contextmanager
from itertools import chain

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import armillary
from armillary.cli.main import app
from armillary.planning.request import PlanRequest
from armillary.plans import Choice, Link, Topology
from armillary.reference.versions import Reference
from armillary.schedules import SCHEDULES, Action, Clip, Schedule, pipeline_method
from armillary.schedules.checker import Setting, flaw
from armillary.schedules.gpipe import gpipe
from armillary.schedules.lowering import Lowering
from armillary.session.plan_job import JobRequest
from armillary.session.verify import verify_workload
from contracts.journey import of_few_tensors
from schedule_pictures import parse

RULES = ("nccl", "gloo")


def local_first(stages, micro_batches):
    """Stage 0 goes through its micro-batches alone; the others are GPipe's, a tick later. No bubble between the two."""
    own = chain(*((Action(2 * m, 1, "F", 0, m), Action(2 * m + 1, 1, "B", 0, m)) for m in range(micro_batches)))
    others = gpipe(stages - 1, micro_batches)
    rows = [
        tuple(sorted(one._replace(start=_later(one, micro_batches), stage=one.stage + 1) for one in row))
        for row in others.ticks
    ]
    period = max(one.end for row in rows for one in row)
    return Schedule("local_first", period, (tuple(own), *rows), ((0,) * stages,) * micro_batches, uncoupled=(0,))


def _later(one, micro_batches):
    """Forwards when stage 0 has handed its output over; backwards when all forwards are done."""
    return 2 * one.micro_batch + 1 + one.stage if one.kind == "F" else one.start + micro_batches


def square(stage, output, batch, loss):
    return output.square().mean()


@contextmanager
def shelf():
    before = dict(SCHEDULES.all())
    SCHEDULES.register(
        "local_first",
        pipeline_method(
            table=lambda options: local_first(options.stages, options.micro_batches),
            notes=lambda planned: [],
            objectives=lambda options: {0: square},
        ),
    )
    try:
        yield
    finally:
        SCHEDULES._entries = before


@pytest.mark.parametrize("clip", [None, Clip(1.0), Clip(1.0, "previous")], ids=str)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 4), (3, 3)])
def test_nothing_hangs_and_the_table_keeps_its_laws(stages, micro_batches, clip):
    made = local_first(stages, micro_batches)
    assert parse(str(made)) == made
    rows = [Lowering(made, rank, range(stages), clip) for rank in range(stages)]
    lists = [[*one.next_step(), *one.next_step(), *one.rest(), *one.next_step(), *one.rest()] for one in rows]
    assert [flaw(lists, Setting(made, tuple(range(stages)), clip), rule) for rule in RULES] == ["", ""]
    sent = [one.message for one in lists[1] if one.op == "SEND" and one.peer == 0 and "norm" not in one.message.what]
    assert not sent, "nothing comes back to the first stage"
    with pytest.raises(ValueError, match="micro-batch 0: B0 starts at tick 1, but B1 ends"):
        Schedule(made.name, made.period, made.ticks, made.staleness)


CHOICE = "local_first(micro_batches=3{})"


def test_it_is_typed_planned_and_simulated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Topology(2, 1, Link(1e-4, 1e8), Link(1e-4, 1e8), 1 << 33).save("two.json")
    asked = ["vision", "--small", "--schedule", CHOICE.format(""), "--topology", "two.json"]
    with shelf():
        drawn = CliRunner().invoke(app, ["plan", *asked, "--json"])
        played = CliRunner().invoke(app, ["simulate", *asked, "--workers", "2"])
    assert (drawn.exit_code, played.exit_code) == (0, 0), (drawn.stderr, played.stderr)
    assert {word for one in json.loads(drawn.stdout)["plan"]["groups"] for word in one["departures"]} == {"uncoupled"}


def verified(rank, workers, more, is_blind):
    with shelf():
        if is_blind:  # a planted fault: the reference lets the gradient through
            Reference.objectives = property(lambda self: {}, lambda self, given: None)
        try:
            request = JobRequest(PlanRequest(schedule=Choice.parse(CHOICE.format(more))))
            found = verify_workload(of_few_tensors(), steps=4, request=request)
        finally:
            if is_blind:
                del Reference.objectives
    return found.tolerance, sum(one.verdict != "equal" for one in found.differences)


def test_two_processes_train_as_one_does(crew):
    for more in ("", ", clip_norm=0.5, clip_by=global, recompute=[0]"):
        assert crew(2).run(verified, more, False) == [(0.0, 0)] * 2
    for tolerance, apart in crew(2).run(verified, "", True):
        assert tolerance == 0.0 and apart > 0


def squared(model, batch):
    return model(batch).square().mean()


def on_two_replicas(rank, world):
    """Two stages each; the first learns from a loss of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    draws = [torch.Generator().manual_seed(number) for number in range(16)]
    batches = [torch.randn(5, 3, generator=draw) for draw in draws]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked = {"schedule": Choice("local_first", {"stages": 2, "micro_batches": 2}), "exchanges": (), "steps": 4}
    with shelf():
        return armillary.verify(model, optimizer, batches, squared, **asked)


def test_replicas_of_an_uncoupled_schedule_are_held_to_the_losses_of_their_stages(crew):
    for found in crew(4).run(on_two_replicas):
        assert found.is_equal and found.workers == 4, str(found)
        assert {"0.weight", "4.weight"} <= {one.parameter for one in found.judged if one.is_trained}
