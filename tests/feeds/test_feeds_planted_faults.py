"""Faults are planted, and what guards against them is seen to tell: a test that could not fail is none."""

import os

import pytest
import redis
from recorded import batches_of_reservoir, listed, trained
from solver import snapshot
from test_recorded import assert_bitwise
from test_resume import TOLD, put, saved
from test_two_programs import of_batch

from armillary import feeds
from armillary.feeds import folder, writer
from armillary.feeds.stream import Stream

ALL = {"window": feeds.AllOnce(), "batch": 4, "patience": 0.5}


def put_of(kind):
    """The class whose `put` and `take` are the store's."""
    if kind == "files":
        return writer.WriterFiles, folder.ReaderFiles
    from armillary.feeds import redis_lists, redis_writer

    return redis_writer.WriterLists, redis_lists.ReaderLists


def sides(store):
    return put_of("redis" if store.startswith("redis") else "files")


def test_bytes_of_the_next_step(store, monkeypatch):
    """The payload of t + 1 under the name of t: the reader compares, and so does every number of a test."""
    real = sides(store)[0].put

    def put_next(self, parts, record):
        real(self, parts, record._replace(id=record.id._replace(step=record.id.step - 1)))

    with feeds.Writer(store) as one:
        monkeypatch.setattr(sides(store)[0], "put", put_next)
        one.put(1, snapshot(1, 0))
        with feeds.Stream(store, **ALL) as stream, pytest.raises(RuntimeError, match=r"lies where .* should"):
            list(stream)


def test_bytes_of_the_next_step_under_the_header_of_this_one(store):
    with feeds.Writer(store) as one:
        for step in range(4):
            one.put(step, {**snapshot(step + 1, 0), "step": snapshot(step, 0)["step"]})
    with feeds.Stream(store, **ALL) as stream, pytest.raises(AssertionError):
        of_batch(next(iter(stream)))


def test_ready_before_its_bytes(files, monkeypatch):
    """A reader that comes between sees a torn snapshot, and says so."""
    real = writer.write

    def write_half(path, parts):
        real(path, [*parts[:-2], parts[-2][: len(parts[-2]) // 2]] if ".draft" in path else parts)

    with feeds.Writer(files) as one:
        one.put(0, snapshot(0, 0))
        with feeds.Stream(files, **{**ALL, "batch": 1}) as stream:
            next(batches := iter(stream))
            monkeypatch.setattr(writer, "write", write_half)
            for step in range(1, 16):  # slots are new, and then used again
                one.put(step, snapshot(step, 0))
            with pytest.raises(RuntimeError, match="is torn"):
                list(batches)


def lying(store):
    """Snapshots that nobody took to the end."""
    if not store.startswith("redis"):
        return len([name for name in os.listdir(store) if name.startswith(("ready-", ".held-"))])
    server, _, name = store.rpartition("/")
    with redis.Redis.from_url(server) as client:
        return len(client.keys(f"{name}:data-*"))


def taken_in_turn(store):
    """Puts and takes more than `keep`, by turns; how many lie there at the end."""
    with feeds.Writer(store, keep=2, patience=0.3) as one, feeds.Stream(store, **{**ALL, "batch": 1}) as stream:
        batches = iter(stream)
        for step in range(4):
            one.put(step, snapshot(step, 0))
            next(batches)
        return lying(store)


def test_a_lease_is_released(store):
    assert taken_in_turn(store) == 0


def test_a_lease_that_is_never_released(store, monkeypatch):
    """The solver runs out of slots; a server keeps what was taken."""
    if store.startswith("redis"):
        reader = sides(store)[1]
        monkeypatch.setattr(reader, "take", _taken_and_kept(reader.take))
        assert taken_in_turn(store) == 4
    else:
        monkeypatch.setattr(os, "rename", lambda old, new: None if ".held" in old else os.replace(old, new))
        with pytest.raises(TimeoutError, match="reader-0 is alive"):
            taken_in_turn(store)


def _taken_and_kept(real):
    def take(self, waiting, place):
        at_once, self.send.at_once = self.send.at_once, lambda *commands: None
        try:
            return real(self, waiting, place)
        finally:
            self.send.at_once = at_once

    return take


def resumed(store, plant=lambda: None):
    """What is trained by a stream that goes on from its state after seven batches; plant: done between the two."""
    put(store, range(40))
    window = feeds.Reservoir(8)
    with feeds.Stream(store, window=window, **TOLD) as stream:
        batches = iter(stream)
        first = [next(batches) for _ in range(7)]
        state = saved(stream.state_dict())
    plant()
    with feeds.Stream(store, window=window, **TOLD) as stream:
        stream.load_state_dict(state)
        return trained([*first, *stream])


def truth():
    return trained(batches_of_reservoir(listed(40, [0]), 8, 4, 2, seed=3))


def test_order_that_is_lost_on_resume(store, monkeypatch):
    faulty = _without_generator(Stream.load_state_dict)
    found = resumed(store, lambda: monkeypatch.setattr(Stream, "load_state_dict", faulty))
    with pytest.raises(AssertionError):
        assert_bitwise(found, truth())


def _without_generator(real):
    def load(self, state):
        real(self, {**state, "generator": self._draw.get_state()})

    return load


def test_order_that_is_kept_on_resume(store):
    assert_bitwise(resumed(store), truth())
