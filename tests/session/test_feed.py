"""Laws of drawing batches, of the links measured and of the examples."""

import importlib.util
from itertools import islice
from pathlib import Path

import pytest
import torch

from armillary.prefetch.batches import Shard, leaves
from armillary.reference.serial import train_step
from armillary.session.parallelize import measure
from armillary.session.plan_job import first_batches
from armillary.session.workload import TrainBatches, stream_seed

EXAMPLES = Path(__file__).parents[2] / "examples"


class Counting:
    """Batches that are numbers: epoch * 100 + place in the epoch."""

    name = "counting"
    batch_size = 1

    def __init__(self, count):
        self.count = count

    def batches(self, split, worker, workers, seed):
        return iter(range(seed * 100 + worker, seed * 100 + self.count, workers))


def test_shares_are_disjoint_and_complete_but_for_the_last_round():
    shares = [Shard(range(11), worker, 3) for worker in range(3)]
    assert [list(share) for share in shares] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    wholes = [Shard(range(11), worker, 3, drop_last=False) for worker in range(3)]
    assert [list(share) for share in wholes] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]
    assert [len(share) for share in (*shares, *wholes)] == [3, 3, 3, 4, 4, 3]
    with pytest.raises(ValueError, match="worker 3 of 3"):
        Shard(range(11), 3, 3)


def test_a_feed_goes_from_epoch_to_epoch_in_new_orders():
    assert list(islice(TrainBatches(Counting(4), (1, 2), 0), 5)) == [1, 3, 101, 103, 201]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_feed_resumes_after_as_many_examples_on_any_number_of_workers(workers):
    feed = TrainBatches(Counting(40), (0, 2), 0)
    for _ in range(26):  # one epoch of 20 and 6 more: 12 examples of both workers
        next(feed)
    rest = [next(TrainBatches.resume(Counting(40), (worker, workers), 0, feed.state())) for worker in range(workers)]
    assert rest == [112 + worker for worker in range(workers)]


def test_a_worker_without_data_is_an_error_and_not_an_endless_loop():
    with pytest.raises(ValueError, match="rank 3: counting has no training batch for worker 3 of 4"):
        next(TrainBatches(Counting(2), (3, 4), 0))


def test_a_worker_without_data_is_named_before_anything_is_planned():
    with pytest.raises(
        ValueError, match=r"counting: batches\('train', worker, 4, seed\) gives workers \[2, 3\] nothing"
    ):
        first_batches(Counting(2), 4, 3, 0)


def test_random_streams_differ_between_steps_and_workers_and_repeat():
    seeds = {stream_seed(0, step, worker) for step in range(20) for worker in range(20)}
    assert len(seeds) == 400
    assert stream_seed(1, 2, 3) == stream_seed(1, 2, 3)


def test_leaves_are_found_in_any_nest():
    one, two = torch.ones(1), torch.zeros(2)
    assert leaves({"a": [one, 3], "b": (two, {"c": one})}) == [one, two, one]


def measured(rank, workers):
    return measure()


@pytest.mark.parametrize("workers", [1, 2])
def test_every_rank_measures_the_same_machines(crew, workers):
    found, *others = crew(workers).run(measured)
    assert all(other == found for other in others)
    assert found.workers == workers
    assert found.link.bytes_per_second > 1e6
    assert 0 < found.memory_bytes < 1 << 50


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(rank, workers):
    return load_example("with_armillary").main()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_example_with_armillary_is_plain_torch_over_the_same_global_batches(crew, workers):
    plain = load_example("plain")
    torch.manual_seed(0)
    model = plain.BagOfWords()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    rounds = zip(*[iter(plain.batches())] * workers, strict=True)
    for together in rounds:
        losses = train_step(model, optimizer, together, plain.loss_of)
    assert crew(workers).run(run_example) == pytest.approx(losses, abs=1e-6)


def test_the_example_differs_from_plain_torch_by_its_marked_lines_only():
    plain = set((EXAMPLES / "plain.py").read_text().splitlines())
    body = (EXAMPLES / "with_armillary.py").read_text().split('"""', 2)[2]
    added = [line for line in body.splitlines() if line not in plain]
    assert len(added) == 4
    assert all("# added" in line or "# changed" in line for line in added)
