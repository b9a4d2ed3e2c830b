"""Prefetch stands behind one door: what a rank enters of it is what the plan asks for, and nobody else imports it."""

import ast
import sys
from functools import partial
from pathlib import Path

import pytest

import armillary
from armillary.facts.plan import Choice
from armillary.session.attach import attach
from scenes import OPTIMIZERS, TABLES, Mixed, batch_of, loss, plan_for
from session.test_prefetch import ahead_of

ROOT = Path(armillary.__file__).parent
ROOM = ROOT / "runtime" / "prefetch"
MAY_IMPORT = {"session/prefetch.py"}  # who picks the kind


def entered(rank, begin, model, optimizer):
    """Files of the room of which a function was called in begin, a loop of nine batches, a save of rows and close."""
    found = set()

    def note(frame, event, _):  # of each call; hands back nothing, so no line of it is traced
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOM}/"):
            found.add(Path(frame.f_code.co_filename).name)

    sys.settrace(note)
    try:
        run = begin(model, optimizer)
        for batch in run.batches([batch_of(rank, step) for step in range(9)]):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        run.export()
        run.close()
    finally:
        sys.settrace(None)
    return found


def entered_by_plan(rank, workers, kind):
    model = Mixed()
    plan = ahead_of(plan_for(model, workers, Choice("owned_rows"), Choice("all_reduce")), kind)
    return entered(rank, partial(attach, plan), model, OPTIMIZERS["sgd"](model.parameters()))


def entered_by_parallelize(rank, workers, prefetch):
    """The plan is made and timed in this job."""
    model = Mixed()
    begin = partial(
        armillary.parallelize,
        batches=[batch_of(0, step) for step in range(4)],
        loss=loss,
        constraints=dict.fromkeys(TABLES, "owned_rows"),
        prefetch=prefetch,
    )
    return entered(rank, begin, model, OPTIMIZERS["sgd"](model.parameters()))


@pytest.mark.parametrize("kind", ["none", "ids", "rows"])
def test_a_rank_enters_what_its_plan_asks_for(crew, kind):
    every = {path.name for path in ROOM.glob("*.py")} - {"__init__.py"}
    leaves_out = {"none": every, "ids": {"row_moves.py"}, "rows": set()}
    assert [every - found for found in crew(2).run(entered_by_plan, kind)] == [leaves_out[kind]] * 2


def test_the_one_line_enters_no_file_of_the_room_when_prefetch_is_off(crew):
    off, on = (crew(2).run(entered_by_parallelize, prefetch) for prefetch in (False, True))
    assert off == [set()] * 2
    assert all(on)  # what is entered would be seen


def imports_of(path):
    return {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}


def test_only_who_picks_the_kind_imports_the_room():
    outside = [path for path in ROOT.rglob("*.py") if path.parent != ROOM]
    room = "armillary.runtime.prefetch."
    found = {path.relative_to(ROOT).as_posix() for path in outside if any(m.startswith(room) for m in imports_of(path))}
    assert found == MAY_IMPORT
