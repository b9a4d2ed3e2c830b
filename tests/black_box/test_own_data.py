"""Every rank trains on data of its own: shares are whole and begin anew, and who draws another's data is told."""

import copy
import pickle
import warnings

import pytest
import torch
from small_models import OPTIMIZERS, Reader, chain, made, pair_loss, word_batch, word_loss
from test_errors import said_by
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import face

WORKERS, SAMPLES, WIDTH = 2, 22, 4


def plain_plan(workers=WORKERS, schedule="simultaneous"):
    draw = torch.Generator().manual_seed(7)
    batch = tuple(torch.randn(2, 2, WIDTH, generator=draw, dtype=torch.float64))
    return face.plan_for(chain(), pair_loss, [batch] * workers, workers, schedule=schedule)


def samples(count=SAMPLES):
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(*torch.randn(2, count, WIDTH, generator=draw, dtype=torch.float64))


def loader_of(data, seed=None, **options):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(data, shuffle=True, generator=generator, **{"batch_size": 2, **options})


def started(plan, **asked):
    model = chain()
    return face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), pair_loss, **asked)


def numbers(batch):
    """Which samples a batch holds."""
    firsts = samples().tensors[0][:, 0].tolist()
    return [firsts.index(value) for value in batch[0][:, 0].tolist()]


# run.shard


def epochs(rank, world, plan):
    run = started(plan)
    train = face.shard(run, loader_of(samples(), seed=3))
    rest = face.shard(run, DataLoader(samples(), batch_size=2), drop_last=False)
    rates = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, epochs=2, steps_per_epoch=len(train))
    seen = []
    for _ in range(2):
        seen.append([])
        for batch in train:
            seen[-1] += numbers(batch)
            face.step(run, [batch])
            rates.step()
    held_out = []

    def measure(_, batch):
        held_out.extend(numbers(batch))
        return {"samples": len(batch[0])}

    total = run.run.evaluate(rest, measure)
    face.close(run)
    return seen, (len(train), len(rest)), held_out, total


def test_a_share_begins_anew_in_every_epoch_knows_its_length_and_leaves_none_out_of_an_evaluation(crew):
    (first, lengths, held_out, total), (second, others, rest, _) = crew(2).run(epochs, plain_plan())
    assert lengths == (5, 6) and others == (5, 5)
    assert sorted(held_out + rest) == list(range(SAMPLES)) and total == {"samples": SAMPLES}
    for mine, theirs in zip(first, second):
        assert len(mine) == len(theirs) == 10 and not {*mine} & {*theirs}
    assert first[0] != first[1], "shuffled anew"


def of_other_kinds(rank, world, plan):
    run = started(plan)
    endless = iter(face.shard(run, iter(range(100, 10_000))))
    sampler = DistributedSampler(samples(), num_replicas=1, rank=0, seed=1)  # cuts nothing, shuffles by epoch
    share, orders = face.shard(run, DataLoader(samples(), batch_size=2, sampler=sampler)), []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        orders.append([number for batch in share for number in numbers(batch)])
    cut = DistributedSampler(samples(), num_replicas=world, rank=rank)
    found = (
        [next(endless), next(endless)],
        said_by(lambda: len(face.shard(run, iter([])))),
        orders,
        said_by(lambda: face.shard(run, DataLoader(samples(), batch_size=2, sampler=cut))),
        said_by(lambda: list(face.shard(run, DataLoader(samples(), batch_size=SAMPLES)))),
    )
    face.close(run)
    return found


def test_shares_of_streams_and_of_samplers_with_epochs_and_none_of_what_is_cut_already_or_too_short(crew):
    for rank, (stream, length, orders, cut, short) in enumerate(crew(2).run(of_other_kinds, plain_plan())):
        assert stream == [100 + rank, 102 + rank] and "len()" in length
        assert orders[0] == orders[2] != orders[1]
        assert "DistributedSampler" in cut and "loop over the loader itself" in cut
        assert "gave 1 batches for 2 workers" in short and "drop_last=False" in short


def in_a_pipeline(rank, world, plan):
    model = chain()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    run = face.start(plan, model, optimizer, pair_loss, next(iter(DataLoader(samples(), batch_size=2))))
    share = face.shard(run, DataLoader(samples(), batch_size=2))
    found = len(share), [numbers(batch) for batch in share]
    face.close(run)
    return found


def test_ranks_that_hold_stages_of_one_replica_are_given_everything(crew):
    for length, seen in crew(2).run(in_a_pipeline, plain_plan(schedule="pipeline")):
        assert length == 11 and [one for batch in seen for one in batch] == list(range(SAMPLES))


# Who is told


def trained(run, batches, steps=3):
    """What training on a few batches says: its error, and its warnings."""

    def train():
        for number, batch in enumerate(batches):
            if number == steps:
                return
            run.optimizer.zero_grad()
            run.loss(run.model, batch).backward()
            run.optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = said_by(train)
    return error, [str(one.message) for one in caught]


def without_shard(rank, world, plan, kind):
    run = started(plan, check_data=kind != "meant")
    torch.manual_seed(rank if "apart" in kind else 0)
    data, batch = samples(), next(iter(loader_of(samples(), seed=2)))
    batches = {
        "as it is": lambda: loader_of(data),
        "meant": lambda: loader_of(data),
        "through run.batches": lambda: face.batches_of(run, loader_of(data)),
        "one batch again and again": lambda: [batch] * 3,
        "shuffled apart": lambda: loader_of(data, batch_size=6),
        "sharded, shuffled apart": lambda: face.shard(run, loader_of(data)),
        "sharded, shuffled apart by a generator": lambda: face.shard(run, loader_of(data, seed=rank)),
        "sharded": lambda: face.shard(run, loader_of(data)),
        "sharded, alike in the targets": lambda: face.shard(run, Augmented(data, rank)),
        "cut by a sampler": lambda: DataLoader(data, 2, sampler=DistributedSampler(data, world, rank)),
        "one batch of its own": lambda: [list(loader_of(data, seed=2))[rank]] * 3,
    }[kind]()
    found = trained(run, batches)
    run.run._give_up(ValueError()) if found[0] != "nothing" else face.close(run)
    return found


class Augmented:
    """The same samples in the same order, disturbed by every rank in its own way."""

    def __init__(self, data, rank):
        self.loader, self.draw = DataLoader(data, 2), torch.Generator().manual_seed(rank)

    def __iter__(self):
        for values, targets in self.loader:
            yield values + torch.randn(values.shape, generator=self.draw, dtype=values.dtype), targets


@pytest.mark.parametrize("kind", ["as it is", "through run.batches"])
def test_ranks_that_forget_shard_are_told_within_three_steps(crew, kind):
    for error, _ in crew(2).run(without_shard, plain_plan(), kind):
        assert "ranks 0, 1 were given the same data" in error and "first 3 steps" in error
        assert "run.shard" in error and "DistributedSampler" in error and "check_data=False" in error


@pytest.mark.parametrize("kind", ["sharded, shuffled apart", "sharded, shuffled apart by a generator"])
def test_shares_of_loaders_that_shuffle_apart_are_told(crew, kind):
    for error, _ in crew(2).run(without_shard, plain_plan(), kind):
        assert "run.shard" in error and "rank 1 drew other batches than rank 0" in error
        assert "generator=draw" in error and "draw.manual_seed(epoch)" in error


def test_ranks_that_shuffle_apart_without_shard_are_warned_of_the_samples_in_common(crew):
    (error, told), (other, quiet) = crew(2).run(without_shard, plain_plan(), "shuffled apart")
    assert error == other == "nothing" and quiet == []
    assert "of the same samples" in told[0] and "ranks 0 and 1" in told[0] and "run.shard" in told[0]


def test_training_on_one_batch_over_and_over_is_legal_and_warned_of(crew):
    (error, told), (other, quiet) = crew(2).run(without_shard, plain_plan(), "one batch again and again")
    assert error == other == "nothing" and quiet == []
    assert "the same batch every time" in told[0] and "check_data=False" in told[0]


@pytest.mark.parametrize(
    "kind", ["meant", "sharded", "sharded, alike in the targets", "cut by a sampler", "one batch of its own"]
)
def test_ranks_with_data_of_their_own_are_told_nothing(crew, kind):
    assert crew(2).run(without_shard, plain_plan(), kind) == [("nothing", []), ("nothing", [])]


def rank_zero_between(rank, world, plan):
    """A loader without a generator shuffles from torch's own stream, which evaluating alone moves on."""
    run = started(plan)
    torch.manual_seed(0)
    share = face.shard(run, loader_of(samples()))
    found = [trained(run, share)[0]]
    if rank == 0:
        list(loader_of(samples()))
    found.append(trained(run, share, 5)[0])
    run.run._give_up(ValueError())
    return found


def test_a_rank_that_evaluates_alone_and_so_shuffles_otherwise_from_then_on_is_told(crew):
    for first, second in crew(2).run(rank_zero_between, plain_plan()):
        assert first == "nothing" and "in its pass 2 over the loader rank 1 drew other batches" in second


def in_steps(rank, world, plan):
    model = chain()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    batches = list(loader_of(samples(), seed=0))
    run = face.start(plan, model, optimizer, pair_loss, batches[0])
    error = said_by(lambda: [face.step(run, [batch]) for batch in batches])
    run.run._give_up(ValueError())
    return error


@pytest.mark.parametrize("schedule", ["delayed_all_reduce", "ring"])
def test_ranks_of_a_schedule_that_forget_shard_are_told(crew, schedule):
    for error in crew(2).run(in_steps, plain_plan(schedule=schedule)):
        assert "ranks 0, 1 were given the same data" in error and "run.shard" in error


def with_a_table(rank, world, plan, is_own):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    found = trained(run, [word_batch(rank * is_own, step) for step in range(5)], 5)
    run.run._give_up(ValueError()) if found[0] != "nothing" else face.close(run)
    return found


def test_ranks_that_read_a_spread_table_alike_are_told(crew):
    batches = [word_batch(worker, 0) for worker in range(2)]
    plan = face.plan_for(made(Reader), word_loss, batches, 2, exchange={"words.weight": "owned_rows"})
    assert crew(2).run(with_a_table, plan, True) == [("nothing", []), ("nothing", [])]
    for error, _ in crew(2).run(with_a_table, plan, False):
        assert "ranks 0, 1 were given the same data" in error


def of_other_options(rank, world, plan):
    return said_by(lambda: started(plan, check_data=rank == 0))


def test_ranks_that_do_not_all_want_their_data_compared_are_refused(crew):
    for said in crew(2).run(of_other_options, plain_plan()):
        assert "different options" in said and "rank 0: {'check_data': True" in said and "rank 1" in said


def looked_at(rank, world, plan):
    """The hook that looks at a model's inputs is in nobody's way, and goes."""
    run = started(plan)
    compiled = []

    def noting(graph, _):
        compiled.append(graph)
        return graph

    fast = torch.compile(run.model, backend=noting)
    copies = [copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))]
    hooks = [len(run.model._forward_pre_hooks)]
    batches = list(face.shard(run, loader_of(samples(), seed=0)))
    for batch in batches:
        run.optimizer.zero_grad()
        pair_loss(fast, batch).backward()
        pair_loss(copies[0], batch), pair_loss(copies[1], batch)
        run.optimizer.step()
    hooks.append(len(run.model._forward_pre_hooks))
    face.close(run)
    return [*hooks, len(run.model._forward_pre_hooks)], len(compiled)


def test_a_model_that_is_looked_at_is_copied_pickled_and_compiled_once_as_ever(crew):
    assert crew(2).run(looked_at, plain_plan()) == [([1, 1, 0], 1)] * 2
