"""What a loop may do between two steps, exactly as in one process; and what would be silently wrong is refused."""

import pytest
import torch
from torch import nn

from armillary import CheckpointEvery
from armillary.reference.serial import train_step
from armillary.session.attach import attach
from beside import adam, close, pair, plan_of, sgd

V, D = 11, 4
OWNED, GATHERED = {"emb.weight": "owned_rows"}, {"emb.weight": "gather_rows"}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(V, D), nn.Linear(D, 2)

    def forward(self, ids):
        return self.lin(torch.tanh(self.emb(ids))).square().sum()


def ids_of(worker, step):
    return torch.randint(0, V, (5,), generator=torch.Generator().manual_seed(100 * step + worker))


def loss(model, ids):
    return model(ids)


def step_by_closure(rank, workers, tables, optimizer_name):
    make = {
        "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.1),
        "adam": adam,
        "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3),
    }[optimizer_name]
    run, model, optimizer, reference, truth = pair(Small, workers, tables, make)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            value = model(ids_of(rank, step))
            value.backward()
            return value

        def true_closure(step=step):
            truth.zero_grad()
            value = sum(reference(ids_of(worker, step)) for worker in range(workers)) / workers
            value.backward()
            return value

        optimizer.step(closure)
        truth.step(true_closure)
    return close(run, model, reference)


@pytest.mark.parametrize(
    ("tables", "optimizer"), [(OWNED, "adagrad"), (OWNED, "adam"), (GATHERED, "adagrad"), ({}, "lbfgs")]
)
def test_a_step_with_a_closure_sees_the_gradients_of_that_closure(crew, tables, optimizer):
    assert crew(2).run(step_by_closure, tables, optimizer) == [{}, {}]


def run_out_while_accumulating(rank, workers, mean, exchange, is_synced):
    """Rank 1 has an odd number of micro-batches, so it runs out in the middle of a step."""
    run, model, optimizer, reference, truth = pair(Small, workers, {"emb.weight": exchange}, adam, mean=mean)
    counts = [6, 3]
    mine = [ids_of(rank, micro) for micro in range(counts[rank])]
    for number, ids in enumerate(run.batches(mine)):
        if number % 2 == 0:
            optimizer.zero_grad()
            if mean == "weights":
                run.weigh(rank + 1)
            if is_synced:
                model(ids).backward()
            else:
                with run.no_sync():
                    model(ids).backward()
        else:
            model(ids).backward()
            optimizer.step()
    for step in range(3):
        work = [[m for m in (2 * step, 2 * step + 1) if m < counts[worker]] for worker in range(workers)]
        present = [worker for worker in range(workers) if work[worker]]
        shares = [worker + 1.0 for worker in present] if mean == "weights" else [1.0] * len(present)

        def accumulated(model, worker, work=work):
            return sum(model(ids_of(worker, micro)) for micro in work[worker])

        def rescale(model, present=present):
            for parameter in model.parameters():
                if mean == "workers" and parameter.grad is not None:
                    parameter.grad.mul_(len(present) / workers)

        train_step(reference, truth, present, accumulated, shares, rescale)
    return close(run, model, reference)


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows"])
@pytest.mark.parametrize(("mean", "is_synced"), [("workers", False), ("workers", True), ("weights", False)])
def test_data_that_run_out_while_gradients_accumulate_lose_nothing(crew, mean, is_synced, exchange):
    assert crew(2).run(run_out_while_accumulating, mean, exchange, is_synced) == [{}, {}]


def evaluate_beside_batches(rank, workers):
    run, model, optimizer, reference, truth = pair(Small, workers, OWNED)
    for step, ids in enumerate(run.batches([ids_of(rank, step) for step in range(3)])):
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()
        train_step(reference, truth, [ids_of(worker, step) for worker in range(workers)], loss)
        if rank == 0:  # while rank 1 already asks for its next batch
            with torch.no_grad():
                assert torch.allclose(model(ids_of(7, step)), reference(ids_of(7, step)))
    return close(run, model, reference)


def test_one_rank_evaluates_while_the_other_waits_for_its_batch(crew):
    assert crew(2).run(evaluate_beside_batches) == [{}, {}]


CALLS = {
    "save": lambda run, folder: run.save(folder),
    "load": lambda run, folder: run.load(None),
    "report": lambda run, folder: run.report(),
    "export": lambda run, folder: run.export(),
    "ema": lambda run, folder: run.ema(0.9),
    "shown averages": lambda run, folder: shown(run.ema(0.5)),
    "due": lambda run, folder: CheckpointEvery(seconds=60.0).due(run, 1),
}


def shown(ema):
    with ema.shown():
        pass


def read_alone_before(rank, workers, folder):
    """Rank 0 validates on its own before a call that all ranks make."""
    torch.manual_seed(11)
    model = Small().double()
    optimizer = sgd(model.parameters())
    run = attach(plan_of(model, workers, OWNED), model, optimizer, timeout=5.0, report_after=1.0)
    averages = run.ema(0.5)
    for call in CALLS.values():
        optimizer.zero_grad()
        model(ids_of(rank, 0)).backward()
        optimizer.step()
        averages.update()
        if rank == 0:
            with torch.no_grad():
                model(ids_of(7, 0))
        call(run, folder)
    run.close()


def test_one_rank_reads_alone_before_any_call_of_all(crew, tmp_path):
    assert crew(2).run(read_alone_before, tmp_path) == [None, None]


def call_alone(rank, workers, folder, name):
    run, model, _, _, _ = pair(Small, workers, OWNED)
    try:
        if rank == 0:
            CALLS[name](run, folder)
        model(ids_of(rank, 0)).backward()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("name", ["save", "report"])
def test_a_call_between_steps_by_one_rank_alone_is_told_at_once_on_all(crew, tmp_path, name):
    for said in crew(2).run(call_alone, tmp_path, name):
        assert "ranks [0] are in a call between two steps (run.save, load, " in said
        assert "while the others run a backward; every rank must make that call, not one alone" in said


def backwards_in_a_step(rank, workers, kind):
    run, model, optimizer, reference, truth = pair(Small, workers, OWNED, adam)
    first, second = ids_of(rank, 0), ids_of(rank, 1)
    if kind == "in turns":
        model(first).backward()
        model(second).backward()
    elif kind == "only the first exchanged":
        model(first).backward()
        with run.no_sync():
            model(second).backward()
    elif kind == "none exchanged":
        with run.no_sync():
            with run.no_sync():
                model(first).backward()
            model(second).backward()
    elif kind == "two graphs, accumulated":
        one, other = model(first), model(second)
        with run.no_sync():
            one.backward()
        other.backward()
    optimizer.step()
    train_step(reference, truth, range(workers), lambda m, worker: m(ids_of(worker, 0)) + m(ids_of(worker, 1)))
    return close(run, model, reference)


@pytest.mark.parametrize("kind", ["in turns", "only the first exchanged", "none exchanged", "two graphs, accumulated"])
def test_several_backwards_in_a_step_add_up(crew, kind):
    assert crew(2).run(backwards_in_a_step, kind) == [{}, {}]


DROPS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
}


def throw_away(rank, workers, tables, how, droppers):
    """Some ranks throw away what they accumulated of their first micro-batch, and declare another weight."""
    run, model, optimizer, reference, truth = pair(Small, workers, tables, sgd, mean="weights")
    for step in range(3):
        optimizer.zero_grad()
        run.weigh(3.0)
        with run.no_sync():
            model(ids_of(rank, 2 * step)).backward()
        if rank in droppers:
            DROPS[how](model, optimizer)
            if how == "optimizer":
                run.weigh(1.0)
        model(ids_of(rank, 2 * step + 1)).backward()
        optimizer.step()

        def kept(net, worker, step=step):
            first = net(ids_of(worker, 2 * step)) if worker not in droppers else 0.0
            return first + net(ids_of(worker, 2 * step + 1))

        shares = [1.0 if worker in droppers and how == "optimizer" else 3.0 for worker in range(workers)]
        train_step(reference, truth, range(workers), kept, shares)
    return close(run, model, reference)


@pytest.mark.parametrize("tables", [OWNED, GATHERED])
@pytest.mark.parametrize(
    ("how", "droppers"),
    [("optimizer", [0, 1]), ("optimizer", [0]), ("optimizer, to zero", [1]), ("model", [1]), ("model, to zero", [0])],
)
def test_what_accumulated_and_was_thrown_away_is_not_learned(crew, tables, how, droppers):
    assert crew(2).run(throw_away, tables, how, droppers) == [{}, {}]


class Rarely(Small):
    def forward(self, ids):
        return super().forward(ids) if len(ids) else self.lin.weight.square().sum() + self.lin.bias.sum()


def throw_away_all_reads(rank, workers, tables):
    """What is learned from reads no table, so that in one process momentum does not move its rows."""
    run, model, optimizer, reference, truth = pair(Rarely, workers, tables, adam)
    nothing = torch.empty(0, dtype=torch.int64)
    model(ids_of(rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    with run.no_sync():
        model(ids_of(rank, 1)).backward()
    optimizer.zero_grad()
    model(nothing).backward()
    optimizer.step()
    train_step(reference, truth, [ids_of(worker, 0) for worker in range(workers)], loss)
    train_step(reference, truth, [nothing] * workers, loss)
    return close(run, model, reference)


@pytest.mark.parametrize("tables", [OWNED, GATHERED])
def test_a_table_of_which_everything_was_thrown_away_stays_as_it_is(crew, tables):
    assert crew(2).run(throw_away_all_reads, tables) == [{}, {}]


def two_graphs(run, model, optimizer, rank):
    """
    Expect: emb.weight: rows read before an earlier backward got a gradient after it, when theirs had left; run each
    """
    one, other = model(ids_of(rank, 0)), model(ids_of(rank, 1))
    one.backward()
    other.backward()


def one_graph_twice(run, model, optimizer, rank):
    """
    Expect: emb.weight: rows read before an earlier backward got a gradient
    """
    value = model(ids_of(rank, 0))
    value.backward(retain_graph=True)
    value.backward()


def a_stranger(run, model, optimizer, rank):
    """
    Expect: a parameter outside the model (2,) has a gradient but is not in the plan
    """
    stranger = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [stranger]})
    (model(ids_of(rank, 0)) + stranger.sum()).backward()
    optimizer.step()


def unfrozen_later(run, model, optimizer, rank):
    """
    Expect: lin.bias (2,) has a gradient but is not in the plan (unfrozen after attach?); call run.close(), which makes
    """
    model.lin.bias.requires_grad_(True)
    model(ids_of(rank, 0)).backward()
    optimizer.step()


def two_weights(run, model, optimizer, rank):
    """
    Expect: gradients accumulated with weight 2.0 are not yet exchanged, got 3
    """
    run.weigh(2)
    with run.no_sync():
        model(ids_of(rank, 0)).backward()
    run.weigh(3)


def negative_weight(run, model, optimizer, rank):
    """
    Expect: want a weight >= 0, got -1
    """
    run.weigh(-1)


def weights_unasked_for(run, model, optimizer, rank):
    """
    Expect: the plan averages over workers; plan with mean='weights'
    """
    run.weigh(2)


def norms_of_what_accumulates(run, model, optimizer, rank):
    """
    Expect: emb.weight: linalg_vector_norm of a gradient that accumulates on this rank and was not exchanged (run.no_
    """
    with run.no_sync():
        model(ids_of(rank, 0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def no_batch(run, model, optimizer, rank):
    """
    Expect: has no batch; give every rank at least one
    """
    next(iter(run.batches([])))


def an_error_half_way(run, model, optimizer, rank):
    """
    Expect: a backward ended in an error and its exchange is half done; start again from a checkpoint
    """
    hidden = torch.tanh(model.emb(ids_of(rank, 0)))
    hidden.register_hook(broken)
    with pytest.raises(ZeroDivisionError):
        model.lin(hidden).sum().backward()
    optimizer.step()


def decay_from_now_on(run, model, optimizer, rank):
    """
    Expect: with which rows move that get no gradient; set them before attach, or plan the table as lazy
    """
    model(ids_of(rank, 0)).backward()
    optimizer.param_groups[0]["maximize"] = True  # changes nothing for a row without gradient
    optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    model(ids_of(rank, 1)).backward()
    optimizer.step()


def another_optimizer_midway(run, model, optimizer, rank):
    """
    Expect: emb.weight: zeros_like needs the whole table, but what the plan exchanges by row can only be read by row
    """
    other = torch.optim.Adam(model.parameters(), lr=0.1)
    other.zero_grad()
    model(ids_of(rank, 0)).backward()
    other.step()


def broken(gradient):
    raise ZeroDivisionError


REFUSALS = [
    two_graphs, one_graph_twice, a_stranger, unfrozen_later, two_weights, negative_weight, weights_unasked_for,
    norms_of_what_accumulates, no_batch, an_error_half_way, decay_from_now_on, another_optimizer_midway,
]  # fmt: skip


class HalfFrozen(Small):
    def __init__(self):
        super().__init__()
        self.lin.bias.requires_grad_(False)


def refuse(rank, workers, deed):
    mean = "weights" if deed in (two_weights, negative_weight) else "workers"
    make = HalfFrozen if deed is unfrozen_later else Small
    run, model, optimizer, _, _ = pair(make, workers, OWNED, mean=mean)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        deed(run, model, optimizer, rank)
    run.close()
    return str(caught.value)


@pytest.mark.parametrize("deed", REFUSALS)
def test_what_would_be_silently_wrong_is_refused(crew, deed):
    for error in crew(2).run(refuse, deed):
        assert deed.__doc__.strip().removeprefix("Expect: ") in error
