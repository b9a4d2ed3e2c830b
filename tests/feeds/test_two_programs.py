"""What a user sees of a solver and a training loop that run beside each other."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import torch
from solver import snapshot
from torch.utils.data import DataLoader

from armillary import feeds


def of_batch(batch):
    """(step, rank) of every row, after every number of it was found to be that snapshot's."""
    found = []
    for u, p, step in zip(batch["u"], batch["p"], batch["step"], strict=True):
        rank = round(float(p[0] - step) * 8)
        for name, value in snapshot(int(step), rank).items():
            assert np.array_equal({"u": u, "p": p, "step": step}[name].numpy(), value), (name, step, rank)
        found.append((int(step), rank))
    return found


def test_every_snapshot_of_a_running_solver_comes_once(store, solve):
    programs = [solve(store, 40, rank=rank, ranks=2, keep=4) for rank in range(2)]
    with feeds.Stream(store, window=feeds.AllOnce(), batch=8, patience=20) as stream:
        seen = [one for batch in stream for one in of_batch(batch)]
    assert sorted(seen) == [(step, rank) for step in range(40) for rank in range(2)]
    for program in programs:
        out, err = program.communicate(timeout=20)
        assert (program.returncode, out) == (0, "begun\ndropped 0\n"), err


def test_a_dataloader_gives_batches_of_a_reservoir(store, solve):
    solve(store, 60, keep=4)
    stream = feeds.Stream(store, window=feeds.Reservoir(16), batch=8, fresh=4, patience=20)
    batches = list(DataLoader(stream, batch_size=None))
    stream.close()
    assert len(batches) >= 5 and all(len(batch["u"]) == 8 for batch in batches)
    assert {type(batch["u"]) for batch in batches} == {torch.Tensor} and batches[0]["u"].shape == (8, 3, 4)
    for batch in batches:
        assert len(set(of_batch(batch))) == 8
    assert len({one for batch in batches for one in of_batch(batch)}) > 16  # those of one window


def test_a_solver_ends_when_it_is_asked_to(store, solve):
    program = solve(store, 100_000, keep=4)
    with feeds.Stream(store, window=feeds.Latest(4), batch=2, patience=20) as stream:
        for number, _batch in enumerate(stream):
            if number == 5:
                stream.ask_to_stop()
    out, err = program.communicate(timeout=20)
    assert "stopped" in out and program.returncode == 0, err


def test_a_slow_reader_does_not_hold_up_a_solver_that_drops(store, solve):
    program = solve(store, 50, keep=3, full="drop_oldest")
    out, err = program.communicate(timeout=20)  # nobody reads, and it ends
    assert "dropped 47" in out, err
    with feeds.Stream(store, window=feeds.AllOnce(), batch=2, patience=20) as stream:
        assert [one for batch in stream for one in of_batch(batch)] == [(47, 0), (48, 0), (49, 0)]


def test_the_newest_alone_is_kept_with_latest(store, solve):
    solve(store, 20, keep=4, full="latest").communicate(timeout=20)
    with feeds.Stream(store, window=feeds.AllOnce(), batch=2, patience=20) as stream:
        assert [one for batch in stream for one in of_batch(batch)] == [(19, 0)]


class Doubles(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, batch):
        return self.factor * batch["u"]


def test_a_solver_asks_the_model_while_it_trains(store, solve):
    with feeds.serve(store, Doubles()):
        programs = [solve(store, 20, rank=rank, ranks=2, asks=True) for rank in range(2)]
        with feeds.Stream(store, window=feeds.AllOnce(), batch=8, patience=20) as stream:
            assert sum(len(batch["u"]) for batch in stream) == 40
        for program in programs:
            _out, err = program.communicate(timeout=20)
            assert program.returncode == 0, err


@pytest.mark.parametrize("window", [feeds.AllOnce(), feeds.Reservoir(6)])
def test_an_ordered_stream_is_the_same_each_time(store, solve, window):
    found = []
    for turn in range(2):
        programs = [solve(f"{store}{turn}", 12, rank=rank, ranks=2, pause=0.001 * (turn ^ rank)) for rank in range(2)]
        with feeds.Stream(f"{store}{turn}", window=window, batch=4, fresh=4, ordered=True, patience=20) as stream:
            found.append([of_batch(batch) for batch in stream])
        for program in programs:
            program.communicate(timeout=20)
    assert found[0] == found[1] and len(found[0]) == 6


class Slow(torch.nn.Module):
    """Tells a list how many questions it had at once; a copy of it, too."""

    sizes: ClassVar[list[int]] = []

    def forward(self, batch):
        self.sizes.append(len(batch["u"]))
        time.sleep(0.2)
        return {"sum": batch["u"].sum(1), "twice": 2 * batch["u"]}


def test_questions_that_wait_are_one_batch(store):
    Slow.sizes.clear()

    def ask(rank):
        with feeds.Writer(store, rank=rank, ranks=3) as writer:
            return writer.ask({"u": np.full(4, rank, np.float64)})

    with feeds.serve(store, Slow()), ThreadPoolExecutor(3) as threads:
        answers = [*threads.map(ask, range(3))]
    assert sum(Slow.sizes) == 3 and len(Slow.sizes) <= 2
    for rank, answer in enumerate(answers):
        assert float(answer["sum"]) == 4 * rank and answer["twice"].tolist() == [2 * rank] * 4


def test_a_stream_that_begins_before_the_next_run_waits_for_it(store, solve):
    """What an earlier run said at its end is not the end of this one, nor are ranks that it had more."""
    for rank in range(2):
        solve(store, 4, rank=rank, ranks=2).communicate(timeout=20)
    with feeds.Stream(store, window=feeds.AllOnce(), batch=8, patience=20) as stream:
        assert len([*stream]) == 1
    with feeds.Stream(store, window=feeds.AllOnce(), batch=3, patience=0.3) as stream:
        with pytest.raises(TimeoutError, match=r"writer 0 \(last step 3 of a run that ended before\)"):
            next(iter(stream))
        stream.patience = 20
        solve(store, 6)
        assert [one for batch in stream for one in of_batch(batch)] == [(step, 0) for step in range(6)]
