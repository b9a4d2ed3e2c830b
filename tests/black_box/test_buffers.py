"""Buffers: rank 0's reach all ranks once a step, of every dtype, and nothing is sent where there are none."""

import torch
from plain_loop import differ, same
from small_models import OPTIMIZERS, chain, pair_loss
from test_errors import said_by
from torch import nn

import face

STEPS, WORKERS = 4, 2
SIGNED_ZERO = torch.tensor([-0.0, float("nan"), 1.5])


class Counting(nn.Module):
    """Statistics of every kind, moved by its batches; the same scratch is seen under two names."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int32))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("last", torch.zeros(4, 4).t())
        self.register_buffer("odd", SIGNED_ZERO.clone(), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("again", self.last)
        self.again = self.last

    def forward(self, values):
        if self.training:
            self.calls += int(values[0, 0].abs() * 10)
            self.seen |= values[0, :3] > 0
            self.last = (values.detach().t() @ values.detach()).t()  # another tensor in its place
        return self.norm(self.lin(values))


def made():
    torch.manual_seed(3)
    return Counting().double()


def batch_of(rank, step):
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 6, 4, generator=draw, dtype=torch.float64).unbind()


def plan_of(model=None):
    model = model or made()
    return face.plan_for(model, pair_loss, [batch_of(rank, 0) for rank in range(WORKERS)], WORKERS)


def truth():
    """One process, in which only rank 0's batches move the buffers."""
    model = made()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(STEPS):
        total = [torch.zeros_like(p) for p in model.parameters()]
        moved = None
        for rank in range(WORKERS):
            before = {name: value.clone() for name, value in model.named_buffers()}
            gradients = torch.autograd.grad(pair_loss(model, batch_of(rank, step)), list(model.parameters()))
            total = [one + other / WORKERS for one, other in zip(total, gradients)]
            moved = moved or {name: value.clone() for name, value in model.named_buffers()}
            model.load_state_dict({**model.state_dict(), **{k: v for k, v in before.items() if k != "odd"}})
        model.load_state_dict({**model.state_dict(), **{k: v for k, v in moved.items() if k != "odd"}})
        for parameter, gradient in zip(model.parameters(), total):
            parameter.grad = gradient
        optimizer.step()
    return dict(model.state_dict())


def trained(rank, world, plan, **asked):
    model = made()
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), pair_loss, **asked)
    for step in range(STEPS):
        if step == STEPS - 1:
            run.run.metrics()
        face.step(run, [batch_of(rank, step)])
    sent = run.run.metrics().get("sent_bytes/other requests", 0.0)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.eval()
    scores = model(batch_of(7, 7)[0]).detach()
    run.run.export()
    face.close(run)
    return buffers, scores, model.state_dict(), sent


def bytes_of(value):
    return value.contiguous().view(-1).view(torch.uint8)


def run_out(rank, world, plan):
    """Rank 0 has one batch, rank 1 four."""
    model = made()
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), pair_loss)
    mine = [batch_of(rank, step) for step in range(1 if rank == 0 else 4)]
    for batch in run.run.batches(mine):
        run.optimizer.zero_grad()
        pair_loss(model, batch).backward()
        run.optimizer.step()
    face.close(run)
    return model.calls.item(), int(model.norm.num_batches_tracked), model.norm.running_mean.clone()


def test_buffers_are_of_a_rank_whose_data_have_not_run_out(crew):
    first, second = crew(2).run(run_out, plan_of())
    calls = [int(batch_of(rank, step)[0][0, 0].abs() * 10) for rank, step in ((0, 0), (1, 1), (1, 2), (1, 3))]
    assert first[:2] == second[:2] == (sum(calls), 4) and torch.equal(first[2], second[2])


class Looking(nn.Module):
    """A table and statistics."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(12, 4), nn.BatchNorm1d(4)

    def forward(self, ids):
        return self.norm(self.words(ids))


def look_before_the_step(rank, world, plan):
    """Rank 0 looks at the model between backward and step, where the others wait to clip or for its statistics."""
    torch.manual_seed(3)
    model = Looking().double()
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), None, timeout=5.0, report_after=1.0)
    ids = torch.arange(6) + rank
    for is_clipped in (False, True):
        run.optimizer.zero_grad()
        model(ids).square().sum().backward()
        if rank == 0:
            with torch.no_grad():
                model(ids)
        if is_clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.optimizer.step()
    face.close(run)


def test_one_rank_may_look_rows_up_between_a_backward_and_its_step(crew):
    model = Looking().double()
    loss, batches = (lambda net, ids: net(ids).square().sum()), [torch.arange(6)] * WORKERS
    plan = face.plan_for(model, loss, batches, WORKERS, exchange={"words.weight": "owned_rows"})
    assert crew(2).run(look_before_the_step, plan) == [None, None]


def without(rank, world, plan):
    return trained(rank, world, plan, broadcast_buffers=False)


def test_every_rank_has_rank_zeros_buffers_after_a_step(crew):
    (first, scores, state, sent), (second, others, _, _) = crew(2).run(trained, plan_of())
    assert first.keys() == second.keys() and "odd" in first
    for name, value in first.items():
        assert torch.equal(bytes_of(value), bytes_of(second[name])), f"{name} differs in its bytes"
    assert torch.equal(scores, others), "ranks evaluate alike"
    want = truth()
    real = [key for key, value in want.items() if value.is_floating_point() and value.numel()]
    assert differ({key: state[key] for key in real}, {key: want[key] for key in real}) == {}
    assert all(torch.equal(state[key], want[key]) for key in ("calls", "seen", "norm.num_batches_tracked"))
    bytes_held = sum(value.numel() * value.element_size() for value in first.values())
    assert sent == bytes_held, "an all-reduce of two ranks sends as much as it is long"


def test_every_rank_keeps_its_own_buffers_if_that_is_wanted(crew):
    (first, scores, _, sent), (second, others, _, _) = crew(2).run(without, plan_of())
    assert not same(first["norm.running_mean"], second["norm.running_mean"]) and not torch.equal(scores, others)
    assert sent == 0


def requests(rank, world, plan):
    """How many a step makes, of a model without buffers."""
    found = []
    for wanted in (True, False):
        model = chain()
        run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), pair_loss, broadcast_buffers=wanted)
        before = run.run._transport.counts.total()
        face.step(run, [batch_of(rank, 0)])
        found.append(run.run._transport.counts.total() - before)
        face.close(run)
    return found


def test_a_model_without_buffers_makes_no_request_for_them(crew):
    for with_them, without_them in crew(2).run(requests, plan_of(chain())):
        assert with_them == without_them > 0


def grown(rank, world, plan):
    model = made()
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), pair_loss)
    model.register_buffer("odd", torch.zeros(7), persistent=False)
    error = said_by(lambda: face.step(run, [batch_of(rank, 0)]))
    run.run._give_up(ValueError())
    return error


def test_a_buffer_that_changes_its_shape_is_named(crew):
    for rank, error in enumerate(crew(2).run(grown, plan_of())):
        assert f"rank {rank}" in error and "buffer 'odd'" in error and "broadcast_buffers=False" in error
