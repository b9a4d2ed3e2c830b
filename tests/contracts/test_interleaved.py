"""Proof of the contracts: interleaved 1F1B, two stages a process. One more schedule is one file."""

from contextlib import contextmanager
from itertools import chain, product

import pytest
from typer.testing import CliRunner

from armillary.cli.main import app
from armillary.cli.names import find, small
from armillary.planning.request import PlanRequest
from armillary.plans import Choice, Link, Topology
from armillary.schedules import SCHEDULES, Action, Clip, Schedule, pipeline_method
from armillary.schedules.checker import Setting, flaw
from armillary.schedules.lowering import Lowering
from armillary.session.plan_job import JobRequest
from armillary.session.verify import verify_workload
from schedule_pictures import parse

PARTS = 2


def interleaved(workers, micro_batches):
    """Narayanan et al., 2021: workers' micro-batches by turns through the first part, then the second."""

    def order(kind, worker):
        groups = [range(micro_batches)[first : first + workers] for first in range(0, micro_batches, workers)]
        every = product(groups, list(range(PARTS))[:: 1 if kind == "F" else -1])
        return [(kind, part * workers + worker, m) for group, part in every for m in group]

    def queue(worker):
        forwards, backwards = order("F", worker), order("B", worker)
        ahead = min(len(forwards), 2 * (workers - worker - 1) + (PARTS - 1) * workers)
        mixed = chain(*zip(forwards[ahead:], backwards))
        return [*forwards[:ahead], *mixed, *backwards[len(forwards) - ahead :]]

    def needed(kind, stage, m):
        if kind == "F" or stage == PARTS * workers - 1:
            return [("F", stage - (kind == "F"), m)] if stage else []
        return [("B", stage + 1, m)]

    ends, rows, queues = {}, [[] for _ in range(workers)], [queue(worker) for worker in range(workers)]
    while any(queues):
        for worker, left in enumerate(queues):
            while left and all(key in ends for key in needed(*left[0])):
                kind, stage, m = left.pop(0)
                start = max(
                    [ends[key] for key in needed(kind, stage, m)] + [row.end for row in rows[worker][-1:]] + [0]
                )
                rows[worker].append(Action(start, 1, kind, stage, m))
                ends[kind, stage, m] = start + 1
    fresh = ((0,) * PARTS * workers,) * micro_batches
    return Schedule("interleaved", max(ends.values()), tuple(map(tuple, rows)), fresh)


@contextmanager
def shelf():
    before = dict(SCHEDULES.all())
    SCHEDULES.register(
        "interleaved",
        pipeline_method(
            table=lambda options: interleaved(options.stages // PARTS, options.micro_batches),
            notes=lambda planned: [],
            parts=PARTS,
        ),
    )
    try:
        yield
    finally:
        SCHEDULES._entries = before


def lists(schedule, calls, clip):
    for rank in range(schedule.workers):
        rows = Lowering(schedule, rank, range(schedule.workers), clip)
        yield [one for call in calls for one in (rows.next_step() if call == "t" else rows.rest())]


@pytest.mark.parametrize("clip", [None, Clip(1.0), Clip(1.0, "previous")], ids=str)
@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 2), (2, 4), (3, 3), (3, 6), (4, 8)])
def test_nothing_hangs_under_either_rule(workers, micro_batches, clip):
    setting = Setting(interleaved(workers, micro_batches), tuple(range(workers)), clip)
    for calls in ("ttts", "tsttts"):
        made = list(lists(setting.schedule, calls, clip))
        assert [flaw(made, setting, rule) for rule in ("nccl", "gloo")] == ["", ""]
    assert any(one.op == "RECV" and one.peer == workers - 1 for one in made[0]), "the last rank sends to the first"


CHOICE, OPTIONS = "interleaved(micro_batches=4{})", {"architecture": "vit", "width": 16, "depth": 2}


def test_it_is_typed_planned_drawn_and_simulated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Topology(2, 1, Link(1e-4, 1e8), Link(1e-4, 1e8), 1 << 33).save("two.json")
    said = [f"--set={name}={value}" for name, value in OPTIONS.items()]
    asked = ["vision", "--small", *said, "--schedule", CHOICE.format(""), "--topology", "two.json"]
    with shelf():
        drawn = CliRunner().invoke(app, ["plan", *asked])
        played = CliRunner().invoke(app, ["simulate", *asked, "--workers", "2"])
    assert (drawn.exit_code, played.exit_code) == (0, 0), (drawn.stderr, played.stderr)
    picture = drawn.stdout[drawn.stdout.index("interleaved: 2 workers, 4 stages, 4 micro-batches") :]
    assert parse(picture) == interleaved(2, 4) and "step of 2 workers: " in played.stdout


def verified(rank, workers, *more):
    with shelf():
        workload = find("vision", {**small("vision"), **OPTIONS})
        schedule = Choice.parse(CHOICE.format(", ".join(["", *more])))
        found = verify_workload(workload, steps=4, request=JobRequest(PlanRequest(schedule=schedule)))
    return found.tolerance, [one.name for one in found.differences if one.verdict != "equal"]


def test_two_processes_train_as_one_does(crew):
    for more in ((), ("clip_norm=0.5", "clip_by=global", "recompute=[1, 2]")):
        for tolerance, apart in crew(2).run(verified, *more):
            assert (tolerance, apart) == (0.0, [])
