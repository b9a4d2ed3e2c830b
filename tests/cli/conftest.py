"""The command in an empty folder, in this process."""

import pytest
from typer.testing import CliRunner

from armillary.cli.main import app


@pytest.fixture
def armillary(tmp_path, monkeypatch):
    """Runs the command in an empty folder; gives its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        return done.exit_code, done.stdout, done.stderr

    return run


@pytest.fixture
def refused(armillary, tmp_path):
    """Runs the command, which must fail with one line on stderr, and gives that line. With exit code 2 it must leave
    nothing but a corpus that it has read."""

    def left():
        return sorted(path for path in tmp_path.rglob("*") if not {"__pycache__", ".cache"} & {*path.parts})

    def run(*arguments, expected=2):
        before = left()
        code, out, err = armillary(*arguments)
        assert (code, out) == (expected, ""), (out, err)
        assert err.startswith("error: ") and err.count("\n") == 1, err
        assert expected != 2 or left() == before
        return err.strip()

    return run
