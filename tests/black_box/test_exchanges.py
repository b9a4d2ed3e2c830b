"""Whatever exchange carries gradients, every rank ends with the weights of one plain loop over all the batches."""

import pytest
import torch
from plain_loop import apart, differ, state_of, train
from small_models import OPTIMIZERS, Idle, Reader, Tied, made, word_batch, word_loss
from torch import nn

import face

STEPS = 4
TABLE = "words.weight"
EXCHANGES = {
    "all_reduce": {"*": "all_reduce"},
    "owned_dense": {"*": "owned_dense"},
    "gather_rows": {TABLE: "gather_rows"},
    "owned_rows": {TABLE: "owned_rows"},
    "owned_rows_by_node": {TABLE: "owned_rows_by_node"},
}


def plan_of(workers, exchange, kind=Reader, dtype=torch.float64, **asked):
    per_node = 1 if exchange == "owned_rows_by_node" else 0
    batches = [word_batch(worker, 0) for worker in range(workers)]
    arguments = {"exchange": EXCHANGES[exchange], "per_node": per_node, **asked}
    return face.plan_for(made(kind, dtype), word_loss, batches, workers, **arguments)


def steps_of(workers, count=STEPS):
    return [[word_batch(worker, step) for worker in range(workers)] for step in range(count)]


def truth(workers, optimizer="momentum", kind=Reader, steps=None, **options):
    model = made(kind, options.pop("dtype", torch.float64))
    losses = train(model, OPTIMIZERS[optimizer](model.parameters()), word_loss, steps or steps_of(workers), **options)
    return state_of(model), losses


def started(plan, optimizer="momentum", kind=Reader, dtype=torch.float64):
    model = made(kind, dtype)
    return face.start(plan, model, OPTIMIZERS[optimizer](model.parameters()), word_loss)


def trained(rank, world, plan, optimizers, kind=Reader, dtype=torch.float64):
    """(weights, losses) of every optimizer in turn."""
    found = []
    for optimizer in optimizers:
        run = started(plan, optimizer, kind, dtype)
        for batches in steps_of(world):
            face.step(run, face.own(run, batches))
        found.append((face.weights(run), [one for (one,) in face.losses(run)]))
        face.close(run)
    return found


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_two_workers_train_as_one_loop_with_every_optimizer(crew, exchange):
    plan = plan_of(2, exchange)
    assert face.exchanges_of(plan)[TABLE] == exchange
    answers = crew(2).run(trained, plan, list(OPTIMIZERS))
    for number, optimizer in enumerate(OPTIMIZERS):
        want, losses = truth(2, optimizer)
        for rank, found in enumerate(answers):
            got, told = found[number]
            assert differ(got, want) == {}, (optimizer, rank)
            assert told == pytest.approx([step[rank] for step in losses], rel=1e-10, abs=0)


@pytest.mark.parametrize("workers", [1, 3])
def test_one_worker_and_three_train_as_one_loop_by_every_exchange(crew, workers):
    want, _ = truth(workers, "adagrad")
    for exchange in EXCHANGES:
        for found in crew(workers).run(trained, plan_of(workers, exchange), ["adagrad"]):
            assert differ(found[0][0], want) == {}, exchange


def test_the_sum_of_two_is_the_loops_to_the_last_bit_in_float32(crew):
    plan = plan_of(2, "all_reduce", dtype=torch.float32)
    answers = crew(2).run(trained, plan, ["sgd"], Reader, torch.float32)
    want, _ = truth(2, "sgd", dtype=torch.float32)
    assert [apart(found[0][0], want) for found in answers] == [{}, {}]


@pytest.mark.parametrize("exchange", ["all_reduce", "owned_rows"])
def test_parameters_that_some_or_no_batches_use_move_as_in_one_loop(crew, exchange):
    want, _ = truth(2, "momentum", Idle)
    first = state_of(made(Idle))
    assert not torch.equal(want["rare"], first["rare"]) and torch.equal(want["never"], first["never"])
    for found in crew(2).run(trained, plan_of(2, exchange, Idle), ["momentum"], Idle):
        got = found[0][0]
        assert differ(got, want) == {}
        assert all(torch.equal(got[name], first[name]) for name in ("never", "frozen"))


def tied_run(rank, world, plan):
    run = started(plan, "adagrad", Tied)
    for batches in steps_of(world):
        face.step(run, face.own(run, batches))
    got, is_tied = face.weights(run), run.model.out.weight is run.model.words.weight
    face.close(run)
    return got, is_tied


def test_tied_weights_stay_tied_and_train_as_in_one_loop(crew):
    batches = [word_batch(worker, 0) for worker in range(2)]
    want, _ = truth(2, "adagrad", Tied)
    for got, is_tied in crew(2).run(tied_run, face.plan_for(made(Tied), word_loss, batches, 2)):
        assert is_tied and differ(got, want) == {}


def clipped(rank, world, plan):
    """A loop of the user's own."""
    run = started(plan, "momentum")
    norms = []
    for step in range(STEPS):
        run.optimizer.zero_grad()
        word_loss(run.model, word_batch(rank, step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.2)))
        run.optimizer.step()
    got = face.weights(run)
    face.close(run)
    return got, norms


@pytest.mark.parametrize("exchange", ["all_reduce", "owned_rows"])
def test_clipping_in_a_loop_of_ones_own_sees_the_norm_over_all_gradients(crew, exchange):
    seen = []
    want, _ = truth(2, clip=lambda model: seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2))))
    assert min(seen) > 0.2  # it did clip
    for got, norms in crew(2).run(clipped, plan_of(2, exchange)):
        assert differ(got, want) == {} and norms == pytest.approx(seen, rel=1e-10)


def accumulated(rank, world, plan):
    run = started(plan, "adagrad")
    for step in range(STEPS):
        run.optimizer.zero_grad()
        with face.no_sync(run):
            word_loss(run.model, word_batch(rank, 2 * step)).backward()
        word_loss(run.model, word_batch(rank, 2 * step + 1)).backward()
        run.optimizer.step()
    got = face.weights(run)
    face.close(run)
    return got


@pytest.mark.parametrize("exchange", ["all_reduce", "owned_rows"])
def test_gradients_that_accumulate_are_exchanged_once_and_add_up(crew, exchange):
    pieces = [
        [word_batch(worker, 2 * step + piece) for worker in range(2) for piece in range(2)] for step in range(STEPS)
    ]
    want, _ = truth(2, "adagrad", steps=pieces, divisor=2)
    for got in crew(2).run(accumulated, plan_of(2, exchange)):
        assert differ(got, want) == {}


def sized(worker, step):
    return word_batch(worker, step, size=3 + 2 * worker + step % 2)


def weighed(rank, world, plan):
    run = started(plan, "momentum")
    for step in range(STEPS):
        batch = sized(rank, step)
        face.weigh(run, float(len(batch[0])))
        face.step(run, [batch])
    got = face.weights(run)
    face.close(run)
    return got


@pytest.mark.parametrize("exchange", ["all_reduce", "owned_rows"])
def test_batches_of_different_sizes_count_by_their_weights(crew, exchange):
    steps = [[sized(worker, step) for worker in range(2)] for step in range(STEPS)]
    want, _ = truth(2, steps=steps, weights=lambda batch: float(len(batch[0])))
    equally, _ = truth(2, steps=steps)
    assert differ(equally, want)  # weights do matter here
    for got in crew(2).run(weighed, plan_of(2, exchange, mean="weights")):
        assert differ(got, want) == {}


def uneven(rank, world, plan):
    run = started(plan, "momentum")
    mine = [word_batch(rank, step) for step in range(STEPS - rank)]
    for batch in face.batches_of(run, mine):
        face.step(run, [batch])
    got, count = face.weights(run), run.steps
    face.close(run)
    return got, count


@pytest.mark.parametrize("exchange", ["all_reduce", "owned_rows"])
def test_a_rank_that_runs_out_of_data_counts_as_zero_until_the_others_are_done(crew, exchange):
    steps = [[word_batch(worker, step) for worker in range(2) if step < STEPS - worker] for step in range(STEPS)]
    want, _ = truth(2, steps=steps, divisor=2)
    for got, count in crew(2).run(uneven, plan_of(2, exchange)):
        assert count == STEPS and differ(got, want) == {}


def over_a_loader(rank, world, plans):
    """Under each plan, in a loop over the run's batches."""
    found = []
    for plan in plans:
        run = started(plan, "adagrad")
        for batch in face.batches_of(run, [word_batch(rank, step) for step in range(6)]):
            face.step(run, [batch])
        found.append(face.weights(run))
        face.close(run)
    return found


def test_rows_asked_for_early_change_no_bit(crew):
    plain, early = plan_of(2, "owned_rows"), plan_of(2, "owned_rows", prefetch=True)
    assert early != plain
    want, _ = truth(2, "adagrad", steps=steps_of(2, 6))
    for late, ahead in crew(2).run(over_a_loader, [plain, early]):
        assert apart(ahead, late) == {} and differ(ahead, want) == {}


def in_one_call(rank, world):
    model = made(Reader)
    batches = [word_batch(worker, 0) for worker in range(world)]
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    run = face.parallelize(model, optimizer, batches, word_loss)
    drawn = [word_batch(number % world, number // world) for number in range(world * STEPS)]
    for batch in face.shard(run, drawn):
        face.step(run, [batch])
    got, plan = face.weights(run), str(run.plan)
    face.close(run)
    return got, plan


def test_parallelize_plans_alike_on_every_rank_and_trains_as_one_loop(crew):
    answers = crew(2).run(in_one_call)
    want, _ = truth(2, "adagrad")
    assert answers[0][1] == answers[1][1]
    assert [differ(got, want) for got, _ in answers] == [{}, {}]
