"""A stream goes on from its state: each snapshot enters once, and what was taken after the state is counted."""

import importlib
import io

import pytest
import torch
from solver import snapshot
from test_two_programs import of_batch

from armillary import feeds

TOLD = {"batch": 4, "fresh": 2, "ordered": True, "seed": 3, "patience": 10}


def put(store, steps, **told):
    with feeds.Writer(store, keep=64, **told) as writer:
        for step in steps:
            writer.put(step, snapshot(step, writer.rank))


def saved(state):
    """As it comes back from a file that holds nothing but tensors, numbers and text."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("window", [feeds.Reservoir(8), feeds.Latest(8)])
def test_a_resumed_stream_gives_the_batches_of_one_that_never_stopped(store, window):
    put(f"{store}whole", range(40))
    with feeds.Stream(f"{store}whole", window=window, **TOLD) as stream:
        whole = [of_batch(batch) for batch in stream]
    put(store, range(40))
    with feeds.Stream(store, window=window, **TOLD) as stream:
        batches = iter(stream)
        first = [of_batch(next(batches)) for _ in range(7)]
        state = saved(stream.state_dict())
    with feeds.Stream(store, window=window, **TOLD) as stream:
        stream.load_state_dict(state)
        assert stream.lost == 0
        rest = [of_batch(batch) for batch in stream]
    assert first + rest == whole


def test_what_was_taken_after_the_state_is_lost_and_counted(store):
    put(store, range(40))
    window = feeds.Reservoir(100)
    with feeds.Stream(store, window=window, **TOLD) as stream:
        batches = iter(stream)
        for _ in range(3):
            next(batches)
        state = saved(stream.state_dict())
        for _ in range(5):
            next(batches)
    with feeds.Stream(store, window=window, **TOLD) as stream:
        with pytest.warns(UserWarning, match="10 snapshots were taken after this state, and are lost"):
            stream.load_state_dict(state)
        assert stream.lost == 10
        list(stream)
        entered = {id.step for id in stream._rows.ids}
    assert entered == set(range(8)) | set(range(18, 40))


def test_a_state_without_its_window_begins_an_empty_one(files):
    put(files, range(12))
    with feeds.Stream(files, window=feeds.AllOnce(), batch=4, patience=10) as stream:
        next(iter(stream))
        state = saved(stream.state_dict(window=False))
    assert not state["rows"]
    with feeds.Stream(files, window=feeds.AllOnce(), batch=4, patience=10) as stream:
        stream.load_state_dict(state)
        assert [of_batch(batch)[0][0] for batch in stream] == [4, 8]


def test_a_snapshot_that_a_solver_puts_again_enters_once(store):
    put(store, range(6), run="flow")
    with feeds.Stream(store, window=feeds.AllOnce(), batch=6, patience=10) as stream:
        assert len(list(stream)) == 1
        with pytest.raises(ValueError, match="does not come after 5"):
            put(store, [4], run="flow")
        put(store, range(4, 9), run="flow", restarts=True)
        assert [one for batch in stream for one in of_batch(batch)] == [(6, 0), (7, 0), (8, 0)]


def test_a_state_of_other_arguments_is_refused(files):
    with feeds.Stream(files, window=feeds.Latest(4), batch=4) as stream:
        state = stream.state_dict()
    words = r"the state is of .*n=4.*; want that of .*n=5"
    with feeds.Stream(files, window=feeds.Latest(5), batch=4) as stream, pytest.raises(ValueError, match=words):
        stream.load_state_dict(state)


class Killed(BaseException):
    """In the place of a signal that nothing catches."""


@pytest.mark.parametrize("reader", [(1, 2), (0, 1)])
def test_what_a_dead_reader_held_is_taken_by_the_next(store, monkeypatch, reader):
    """By itself when it comes back, and by another that has its writers now."""
    put(store, range(4), rank=1, ranks=2)
    put(store, range(4), rank=0, ranks=2)
    side = importlib.import_module("armillary.feeds." + ("redis_lists" if store.startswith("redis") else "folder"))

    def die(*_):
        raise Killed

    told = {"window": feeds.AllOnce(), "batch": 4, "patience": 10, "ordered": True}
    with monkeypatch.context() as patched, feeds.Stream(store, reader=(1, 2), **told) as stream:
        patched.setattr(side, "read", die)
        with pytest.raises(Killed):
            next(iter(stream))
    ranks = [1] if reader == (1, 2) else [0, 1]
    with feeds.Stream(store, reader=reader, **told) as stream:
        found = [one for batch in stream for one in of_batch(batch)]
    assert found == [(step, rank) for step in range(4) for rank in ranks]
