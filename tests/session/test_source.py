"""A loader is drawn before its turn only where nobody can tell, and what it raises comes at its turn."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from armillary.prefetch.batches import LeftOver, Source, leaves

COUNT = 8


def tensors(log):
    for number in range(COUNT):
        log.append(number)
        yield {"ids": torch.tensor([number, number + 1])}


def global_torch(log):
    for batch in tensors(log):
        yield batch | {"noise": torch.rand(2)}


def global_numpy(log):
    for batch in tensors(log):
        yield batch | {"noise": torch.tensor(np.random.rand())}


def global_python(log):
    for batch in tensors(log):
        yield batch | {"noise": torch.tensor(random.random())}


def one_buffer(log):
    held = torch.zeros(2, dtype=torch.int64)
    for batch in tensors(log):
        yield held.copy_(batch["ids"])


def one_numpy_buffer(log):
    """What torch's version counter does not see."""
    held = np.zeros(2, dtype=np.int64)
    for batch in tensors(log):
        held[:] = batch["ids"].numpy()
        yield torch.from_numpy(held)


def two_numpy_buffers(log):
    held = [np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)]
    for number, batch in enumerate(tensors(log)):
        held[number % 2][:] = batch["ids"].numpy()
        yield torch.from_numpy(held[number % 2])


class Placed:
    """Tells its place, for a loop to save."""

    def __init__(self, log):
        self.log = log

    def __iter__(self):
        return tensors(self.log)

    def state_dict(self):
        return {"drawn": len(self.log)}


def drawn_at_each_turn(make):
    """How many batches had been drawn when the loop got its n-th."""
    log, drawn, first = [], [], []
    source = Source(make(log), 2, LeftOver())
    while (batch := source.take()) is not None:
        source.glance()
        drawn.append(len(log))
        first.append(int(leaves(batch)[0][0]))
    assert first == list(range(COUNT))
    return drawn


def test_a_quiet_loader_is_two_batches_ahead_once_it_has_been_watched():
    assert drawn_at_each_turn(tensors) == [1, 2, 5, 6, 7, 8, 8, 8]


GIVEN_AWAY = [global_torch, global_numpy, global_python, one_buffer, one_numpy_buffer, two_numpy_buffers, Placed]


@pytest.mark.parametrize("make", GIVEN_AWAY)
def test_where_somebody_could_tell_each_batch_is_drawn_at_its_turn(make):
    assert drawn_at_each_turn(make) == list(range(1, COUNT + 1))


def shuffled_late(log):
    for number, batch in enumerate(tensors(log)):
        yield batch | {"noise": torch.rand(1) if number == 5 else torch.zeros(1)}


def test_a_loader_that_draws_random_numbers_late_is_told_on_and_not_drawn_ahead_again():
    with pytest.warns(UserWarning, match="drew from a global random state for its batch 5"):
        assert drawn_at_each_turn(shuffled_late) == [1, 2, 5, 6, 6, 6, 7, 8]


def overwritten_late(log):
    held = torch.zeros(2, dtype=torch.int64)
    for number, batch in enumerate(tensors(log)):
        yield held.copy_(batch["ids"]) if number > 3 else batch


def test_a_batch_overwritten_while_the_loop_holds_it_is_an_error():
    with pytest.raises(RuntimeError, match="wrote into a batch it had given before"):
        drawn_at_each_turn(overwritten_late)


def broken_late(log):
    yield from (batch for number, batch in enumerate(tensors(log)) if number < 5)
    raise OSError("no such file")


def test_what_the_loader_raises_comes_at_its_turn():
    seen = []
    source = Source(broken_late([]), 2, LeftOver())
    for _ in range(5):
        seen.append(int(source.take()["ids"][0]))
        source.glance()
    assert seen == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="no such file"):
        source.take()


@pytest.mark.parametrize("make", [tensors, lambda log: zip(tensors(log), strict=True), broken_late])
def test_a_loop_over_a_stream_begins_with_what_the_last_one_had_drawn_early(make):
    stream, left, seen, drawn = make([]), LeftOver(), [], []
    with pytest.raises(OSError, match="no such file") if make is broken_late else nullcontext():
        for count in (5, 0, 1, COUNT):
            source = Source(stream, 2, left)
            while count and (batch := source.take()) is not None:
                source.glance()
                seen.append(int(leaves(batch)[0][0]))
                drawn.append(len(source.early))
                count -= 1
            source.leave()
    assert seen == list(range(5 if make is broken_late else COUNT)) and max(drawn) == 2


def test_a_loader_that_begins_anew_leaves_nothing_over():
    loader, left = list(tensors([])), LeftOver()
    for _ in range(2):
        source = Source(loader, 2, left)
        for number in range(5):
            assert int(leaves(source.take())[0][0]) == number
            source.glance()
        source.leave()


def test_inference_tensors_are_drawn_ahead_too():
    def inferred(log):
        with torch.inference_mode():
            yield from tensors(log)

    assert drawn_at_each_turn(inferred) == [1, 2, 5, 6, 7, 8, 8, 8]
