"""Prefetch stands behind one door: what a rank enters of it is what the plan asks for, and nobody else imports it."""

import ast
import sys
from functools import partial
from pathlib import Path

import pytest

import armillary
from armillary.plans import Choice
from armillary.session.attach import attach
from scenes import OPTIMIZERS, TABLES, Mixed, batch_of, loss, plan_for
from session.test_prefetch import ahead_of

ROOT = Path(armillary.__file__).parent
ROOM = ROOT / "prefetch"
FILES = {"predictor.py", "prefetcher.py"}  # that run where something is prefetched
DELAY = {"delayed_gradients.py"}  # where gradients wait, too
MAY_IMPORT = {"session/hooks_state.py"}  # who picks the kind


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


@pytest.mark.parametrize("kind", ["none", "ids", "rows", "gradients"])
def test_a_rank_enters_what_its_plan_asks_for(crew, kind):
    wanted = {"none": set(), "gradients": FILES | DELAY}.get(kind, FILES)
    assert [found & (FILES | DELAY) for found in crew(2).run(entered_by_plan, kind)] == [wanted] * 2


def test_the_one_line_enters_no_file_of_the_room_when_prefetch_is_off(crew):
    off, on = (crew(2).run(entered_by_parallelize, prefetch) for prefetch in (False, True))
    assert [found & FILES for found in off] == [set()] * 2
    assert all(found & FILES for found in on)  # what is entered would be seen


def imports_of(path):
    return {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("files", [FILES, DELAY], ids=["rows", "gradients"])
def test_only_who_picks_the_kind_imports_the_room(files):
    inner = {f"armillary.prefetch.{file.removesuffix('.py')}" for file in files}
    outside = [path for path in ROOT.rglob("*.py") if path.name not in files or path.parent != ROOM]
    found = {path.relative_to(ROOT).as_posix() for path in outside if inner & imports_of(path)}
    found -= {"owners/worker.py"}  # it predicts what a forward looks up, and prefetches nothing
    assert found == MAY_IMPORT
