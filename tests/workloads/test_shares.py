"""Workers share an epoch: nothing twice, and the global batch does not depend on how many share it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.workloads import shares


def drawn(split, examples, batch_size, workers, seed=0):
    return [list(shares.draw(split, examples, batch_size, (w, workers), seed)) for w in range(workers)]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 40), st.integers(0, 3))
def test_train_batches_are_full_and_equally_many_and_nothing_is_drawn_twice(workers, size, spare, seed):
    examples = workers * size + spare
    batches = drawn("train", examples, size, workers, seed)
    assert {len(mine) for mine in batches} == {examples // (workers * size)}
    assert {len(batch) for mine in batches for batch in mine} == {size}
    seen = np.concatenate([batch for mine in batches for batch in mine])
    assert len(set(seen.tolist())) == len(seen)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 60))
def test_held_out_is_seen_exactly_once_in_batches_no_larger_than_asked(workers, size, examples):
    batches = drawn("held_out", examples, size, workers)
    seen = np.concatenate([batch for mine in batches for batch in mine])
    assert sorted(seen.tolist()) == list(range(examples))
    assert max(len(batch) for mine in batches for batch in mine) <= size


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_four_workers_of_eight_see_what_one_of_thirty_two_sees(split):
    four, one = drawn(split, 230, 8, 4), drawn(split, 230, 32, 1)[0]
    for step, together in enumerate(one):
        np.testing.assert_array_equal(np.concatenate([mine[step] for mine in four]), together)


def test_the_seed_alone_decides_the_order():
    first, again, other = (drawn("train", 100, 4, 2, seed)[1] for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not all((a == b).all() for a, b in zip(first, other, strict=True))


def test_too_little_data_a_wrong_split_and_a_wrong_worker_are_refused():
    with pytest.raises(ValueError, match="7 training examples do not fill one global batch of 2 workers x 4"):
        drawn("train", 7, 4, 2)
    with pytest.raises(ValueError, match="no split 'test'"):
        drawn("test", 7, 4, 2)
    with pytest.raises(ValueError, match="worker 2 of 2"):
        list(shares.draw("train", 100, 4, (2, 2), 0))
