"""What is refused, or told, and in which words."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from solver import snapshot
from torch.utils.data import DataLoader
from valkey_server import Server

from armillary import feeds

ONE = {"u": np.zeros(3, np.float32)}
ALL = {"window": feeds.AllOnce(), "batch": 1}


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from armillary.feeds.writer import Writer
from armillary import feeds
assert feeds.Writer is Writer
"""


def test_the_writer_is_there_without_torch():
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, env=path)


ALONE = """
import sys
sys.path.append(sys.argv[1])  # of numpy
from writer import Writer
with Writer("flow") as w:
    w.put(0, {"u": 1.0})
assert "armillary" not in sys.modules
"""


def test_the_writer_stands_alone(tmp_path):
    (tmp_path / "writer.py").write_text(Path(importlib.import_module("armillary.feeds.writer").__file__).read_text())
    (tmp_path / "solver.py").write_text(ALONE)
    where = str(Path(np.__file__).parents[1])
    subprocess.run([sys.executable, "-S", "solver.py", where], check=True, cwd=tmp_path, env={})


@pytest.mark.parametrize(("first", "second", "words"), [
    (ONE, {"u": np.zeros(4, np.float32)}, r"step 1 are \[\('u', 'float32', \(4,\)\)\]; want those of the first"),
    (ONE, {"u": np.zeros(3)}, "float64"),
    (ONE, {"v": np.zeros(3, np.float32)}, r"\('v', "),
    (ONE, {"u": np.array([{}])}, "field 'u' is of object"),
    (ONE, {"u": np.zeros(0)}, r"shape \(0,\)"),
    (ONE, {}, "want one field at least"),
])  # fmt: skip
def test_other_fields_than_the_first(store, first, second, words):
    with feeds.Writer(store) as writer:
        writer.put(0, first)
        with pytest.raises(ValueError, match=words):
            writer.put(1, second)


@pytest.mark.parametrize("told", [{"rank": 1}, {"keep": 1}, {"full": "wait"}, {"run": "a-b"}])
def test_arguments_of_a_writer(files, told):
    with pytest.raises(ValueError, match="Writer: want 0 <= rank < ranks, keep >= 2"):
        feeds.Writer(files, **told)


@pytest.mark.parametrize(("told", "words"), [
    ({"batch": 0}, "want batch >= 1"), ({"fresh": 0, "ordered": True}, "1 if ordered"),
    ({"reader": (2, 2)}, "0 <= i < k"), ({"window": feeds.AllOnce(), "fresh": 3}, "leave fresh=3 out"),
])  # fmt: skip
def test_arguments_of_a_stream(files, told, words):
    with pytest.raises(ValueError, match=words):
        feeds.Stream(files, **{"window": feeds.Latest(4), "batch": 2, **told})


def test_writers_of_different_fields(store):
    with feeds.Writer(store, rank=0, ranks=2) as one, feeds.Writer(store, rank=1, ranks=2) as other:
        one.put(0, ONE)
        other.put(0, {"u": np.zeros(4, np.float32)})
        words = r"writer 1 puts .* want the same names, dtypes and shapes"
        with feeds.Stream(store, window=feeds.AllOnce(), batch=2) as stream, pytest.raises(ValueError, match=words):
            list(stream)


def test_leftovers_of_an_older_run(store):
    with feeds.Writer(store, run="old") as writer:
        writer.put(0, ONE)
    with pytest.raises(ValueError, match=r"1 snapshots of an older run old lie in .* fresh_start=True"):
        feeds.Writer(store, run="new")
    with feeds.Writer(store, run="new", fresh_start=True) as writer:
        writer.put(0, {"v": np.ones(2)})
    with feeds.Stream(store, **ALL) as stream:
        assert [batch["v"].tolist() for batch in stream] == [[[1.0, 1.0]]]


def test_a_full_memory(files, monkeypatch):
    with feeds.Writer(files, keep=3) as writer:
        unit = os.statvfs(files).f_frsize
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1, f_frsize=unit))
        with pytest.raises(OSError, match=rf"3 slots in .* want {3 * (4096 + 12 + 8)} bytes, and {unit} are free"):
            writer.put(0, ONE)


def test_one_place_is_one_process(store):
    with feeds.Writer(store), pytest.raises(RuntimeError, match="give each process its own"):
        feeds.Writer(store)
    with feeds.Stream(store, **ALL), pytest.raises(RuntimeError, match="give each process its own"):
        feeds.Stream(store, **ALL)
    with feeds.serve(store, torch.nn.Identity()), pytest.raises(RuntimeError, match="give each process its own"):
        feeds.serve(store, torch.nn.Identity())


def test_nobody_takes(store):
    with feeds.Writer(store, keep=2, patience=0.2) as writer:
        writer.put(0, ONE)
        writer.put(1, ONE)
        with pytest.raises(TimeoutError, match=r"for 0.2 s; 2 lie there, no reader is alive; start a stream"):
            writer.put(2, ONE)
        with feeds.Stream(store, **ALL), pytest.raises(TimeoutError, match="2 lie there, reader-0 is alive"):
            writer.put(2, ONE)


def test_nobody_puts(store):
    with feeds.Stream(store, **ALL, patience=0.3) as stream:
        with pytest.raises(TimeoutError, match=r"nothing came into .* for 0.3 s: no writer has begun"):
            list(stream)
        with feeds.Writer(store, ranks=2) as writer:
            writer.put(7, ONE)
            with pytest.raises(TimeoutError, match=r"writer 0 \(last step 7\), writer 1 \(last step none\)"):
                list(stream)


def test_a_writer_that_died_is_told_at_once(store, solve):
    program = solve(store, 1000, pause=0.01)
    with feeds.Stream(store, **ALL, patience=60) as stream:
        next(batches := iter(stream))
        program.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(RuntimeError, match=r"writer 0 \(last step \d+\) of .* died before it ended"):
            list(batches)
        assert time.monotonic() - killed < 5
        assert solve(store, 5, first=1000).stdout.readline() == "begun\n"  # and the same stream goes on
        assert len(list(stream)) >= 5


def test_an_exception_in_the_solver_is_no_end(store):
    def solver():
        with feeds.Writer(store) as writer:
            writer.put(0, ONE)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        solver()
    with feeds.Stream(store, **ALL) as stream, pytest.raises(RuntimeError, match="died before it ended"):
        list(stream)


def test_workers_of_a_dataloader(files):
    with feeds.Stream(files, **ALL) as stream, pytest.raises(ValueError, match="want num_workers=0"):
        list(DataLoader(stream, batch_size=None, num_workers=1))


def test_ask_where_nobody_serves(store):
    with feeds.Writer(store) as writer, pytest.raises(RuntimeError, match="nobody serves"):
        writer.ask(ONE)


class Broken(torch.nn.Module):
    def forward(self, batch):
        raise KeyError("weights")


class Flat(torch.nn.Module):
    def forward(self, batch):
        return batch["u"].sum()


def test_an_error_of_the_model_reaches_who_asks(store):
    with feeds.Writer(store) as writer:
        with feeds.serve(store, Broken()), pytest.raises(RuntimeError, match="raised KeyError: 'weights'"):
            writer.ask(ONE)
        with feeds.serve(store, Flat()), pytest.raises(RuntimeError, match=r"has shape \[\]; want 1 rows"):
            writer.ask(ONE)


def test_newer_weights_answer_after_a_reload(store):
    model = torch.nn.Linear(3, 2)
    with (
        feeds.Writer(store) as writer,
        feeds.serve(store, model, forward=lambda model, batch: model(batch["u"])) as server,
    ):
        first = writer.ask({"u": np.ones(3, np.float32)})
        with torch.no_grad():
            model.weight.add_(1)
        np.testing.assert_array_equal(writer.ask({"u": np.ones(3, np.float32)}), first)  # it serves a copy
        server.reload(model.state_dict())
        np.testing.assert_allclose(writer.ask({"u": np.ones(3, np.float32)}), first + 3, rtol=1e-5)


def test_a_redis_that_evicts(tmp_path, redis_server):
    server = Server(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ValueError, match="evicts keys by allkeys-lru; want maxmemory-policy noeviction"):
            feeds.Writer(f"redis://127.0.0.1:{server.port}/flow")
        with pytest.raises(ValueError, match="want redis://host:port/name"):
            feeds.Writer(f"redis://127.0.0.1:{server.port}")
    finally:
        server.kill()


def test_a_checksum_tells_a_changed_byte(files):
    with feeds.Writer(files, check=True) as writer:
        writer.put(0, snapshot(0, 0))
        (name,) = [name for name in os.listdir(files) if name.startswith("ready-")]
        with open(f"{files}/{name}", "r+b") as file:
            file.seek(4096 + 5)
            file.write(b"\x55")
        with feeds.Stream(files, **ALL) as stream, pytest.raises(RuntimeError, match="torn: the checksum"):
            next(iter(stream))


def test_nothing_is_left_but_what_was_said(files):
    with feeds.Writer(files, rank=0) as writer:
        for step in range(5):
            writer.put(step, ONE)
    with feeds.Stream(files, **ALL) as stream:
        list(stream)
    assert sorted(os.listdir(files)) == ["reader-0", "writer-0"]
