"""Lines that advice tells its users to type, or to put into a script: five of them run here, all by `.ci/advice`."""

import contextlib
import io
import json
import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

import face
from armillary.cli.main import app

OWN = Path(__file__).parents[2] / ".ci" / "own_models.py"
MACHINES = ("--workers", "2", "--gbit", "0.1")


def typed(*words):
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a workload file of the user's own."""
    made = tmp_path_factory.mktemp("own")
    shutil.copy(OWN, made)
    return made


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)


@cache
def rows_of(kind):
    return json.loads(typed("advise", OWN.name, "--set", f"kind={kind}", *MACHINES, "--json"))["rows"]


def row_of(kind, method):
    (row,) = [row for row in rows_of(kind) if row["method"] == method]
    assert row["applies"], row["reason"]
    return row


def run_script(rank, workers, script, folder):
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(script, "advised", "exec"), {"__name__": "__main__"})
    finally:
        sys.path.remove(folder)
    return True


def test_a_command_that_trains(here, folder):
    line = shlex.split(row_of("chain", "EventGraD")["shell"])
    words = [word for word in line[1:] if word not in ("--workers", "2")]  # two ranks are there
    ended = face.command_in_job(2, *words, "--steps", "2", folder=folder)
    assert line[:2] == ["armillary", "train"] and [one.code for one in ended] == [0, 0], ended


def test_a_command_that_trains_under_a_budget(here):
    line = shlex.split(row_of("blocks", "KARMA")["shell"])
    assert line[:2] == ["armillary", "residency"] and "a pass takes" in typed(*line[1:])


@pytest.mark.parametrize(("kind", "method"), [("chain", "RePurpose"), ("blocks", "parallel equations")])
def test_a_script_for_one_process(here, folder, kind, method):
    assert run_script(0, 1, row_of(kind, method)["python"], str(folder))


def test_a_script_for_all_ranks(here, folder, crew):
    script = typed("advise", OWN.name, "--set", "kind=blocks", *MACHINES, "--script", "Colossal-AI")
    assert "under torchrun" in script and crew(2).run(run_script, script, str(folder)) == [True, True]
