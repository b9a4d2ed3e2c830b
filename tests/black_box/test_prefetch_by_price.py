"""Prefetch is taken by price over a DataLoader of torch's own, and over nothing else; it changes no bit."""

import pytest
import torch
from plain_loop import same
from small_models import ROWS, Reader, made
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    TensorDataset,
)

import armillary
import face
from armillary.prefetch.batches import is_plain_loader
from armillary.session import parallelize
from armillary.session import plan_job as decide

TABLE, STEPS = "words.weight", 7
BY_ROW = {TABLE: "owned_rows"}
FAR = armillary.Topology(2, 1, *[armillary.Link(5e-3, 1e6)] * 2, 1 << 33)  # look-ups in time are dear there
TAKEN, OFF = (
    "prefetch was taken by price",
    "quicker way: prefetch, exact, simulated step ",
)


def data():
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randint(ROWS, (60, 3), generator=draw), torch.randint(3, (60,), generator=draw))


class Backwards(Sampler):
    def __iter__(self):
        return iter(range(59, -1, -1))

    def __len__(self):
        return 60


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


class Mine(DataLoader):
    pass


def shuffled():
    return DataLoader(data(), 4, shuffle=True, generator=torch.Generator().manual_seed(3))


LOADERS = {
    "torch's own": shuffled,
    "in order": lambda: DataLoader(data(), 4),
    "stacked": lambda: DataLoader(StackDataset(data()), 4),
    "torch's batches": lambda: DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(data()), 4, True)),
    "a sampler of one's own": lambda: DataLoader(data(), 4, sampler=Backwards()),
    "batches of one's own": lambda: DataLoader(data(), batch_sampler=BatchSampler(Backwards(), 4, True)),
    "a stream": lambda: DataLoader(Stream(), 4),
    "a loader of one's own": lambda: Mine(data(), 4),
    "a list": lambda: list(shuffled()),
    "a generator": lambda: iter(shuffled()),
}
PLAIN = ("torch's own", "in order", "stacked", "torch's batches")


@pytest.mark.parametrize("kind", LOADERS)
def test_only_torch_s_own_loaders_are_known_to_give_what_they_would_have_given_later(kind):
    assert is_plain_loader(LOADERS[kind]()) is (kind in PLAIN)


def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def trained(rank, world, kind, prefetch, is_one_line):
    """Two epochs over a loader; what came out, and how the table looked ahead in each."""
    before = decide.measure, parallelize.measure_links
    decide.measure = parallelize.measure_links = lambda *_: FAR
    try:
        model, loader = made(Reader), LOADERS[kind]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        first = () if is_one_line else (loader, loss)
        run = armillary.parallelize(model, optimizer, *first, constraints=BY_ROW, prefetch=prefetch)
        ahead = []
        for _ in range(2):
            for batch in run.batches(run.shard(loader)):
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            ahead.append(run.plan.group_of(TABLE).prefetch)
        whole = run.export()
        text = " ".join(str(run.plan).split())
        run.close()
        return whole and whole["model"], ahead, text
    finally:
        decide.measure, parallelize.measure_links = before


@pytest.mark.parametrize("is_one_line", [False, True], ids=["batches", "one line"])
def test_it_is_taken_where_a_step_is_shorter_for_it_and_changes_no_bit(crew, is_one_line):
    (taken, ahead, said), _ = crew(2).run(trained, "torch's own", None, is_one_line)
    (plain, behind, other), _ = crew(2).run(trained, "torch's own", False, is_one_line)
    assert ahead[-1] != "none" and behind == ["none", "none"] and TAKEN in said and OFF in other
    assert same(dict(taken), dict(plain))


def test_over_another_loader_the_plan_says_what_asking_for_it_would_bring(crew):
    kinds = [("a sampler of one's own", False), ("a loader of one's own", True)]
    for kind, is_one_line in kinds:
        (_, ahead, said), _ = crew(2).run(trained, kind, None, is_one_line)
        assert ahead == ["none", "none"] and OFF in said and TAKEN not in said, kind


def test_it_is_not_taken_where_it_brings_nothing():
    seen = armillary.profile(made(Reader), [next(iter(shuffled())) for _ in range(4)], loss, workers=2)
    whole = armillary.plan(seen, FAR, constraints={"*": "all_reduce"}, prefetch=None)
    assert not whole.looks_ahead
    near, far = (armillary.plan(seen, one, constraints=BY_ROW, prefetch=None) for one in (face.machines(1), FAR))
    assert not near.looks_ahead and far.looks_ahead
    assert {group.prefetch for group in far.groups} <= {"none", "ids", "rows"}  # gradients wait where it is asked for
    assert far.step_seconds < armillary.plan(seen, FAR, constraints=BY_ROW).step_seconds
