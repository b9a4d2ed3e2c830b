"""When gradients may wait, and what must not notice: handles of gradients, the model that outlives its optimizer."""

import gc
import weakref
from contextlib import closing

import pytest
import torch

from armillary.plans import Choice
from armillary.session.attach import attach
from scenes import Mixed, batch_of, loss, plan_for
from session.test_prefetch import STEPS, ahead_of, batches_of, plain_step, waiting_of


class Counting(torch.optim.SGD):
    """Keeps its count where nobody looks for state."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        return super().step(closure)


WAYS = {
    "sgd": (torch.float32, lambda ps: torch.optim.SGD(ps, lr=0.1)),
    "fused": (torch.float32, lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True)),
    "bfloat16": (torch.bfloat16, lambda ps: torch.optim.SGD(ps, lr=0.1)),
    "attributes": (torch.float32, Counting),
}


def started(workers, way, prefetch):
    dtype, optimizer_of = WAYS[way]
    torch.manual_seed(7)
    model = Mixed().to(dtype)
    optimizer = optimizer_of(model.parameters())
    plan = plan_for(model, workers, Choice("owned_rows"), Choice("all_reduce"))
    return attach(ahead_of(plan, prefetch), model, optimizer, check_order=True), model, optimizer


def train(rank, workers, way, prefetch):
    run, model, optimizer = started(workers, way, prefetch)
    has_waited = 0
    for step, batch in enumerate(run.batches(batches_of(rank, ""))):
        plain_step(run, model, optimizer, batch, step)
        has_waited += waiting_of(run)
    shards = {name: table.shard.clone() for name, table in run._engine.tables.items()}
    run.close()
    return shards, has_waited


def with_and_without(rank, workers, way):
    (plain, _), (ahead, has_waited) = (train(rank, workers, way, kind) for kind in ("none", "gradients"))
    return [name for name in plain if not torch.equal(plain[name], ahead[name])], has_waited > 0


@pytest.mark.parametrize(
    ("way", "waits"), [("sgd", True), ("fused", False), ("bfloat16", False), ("attributes", False)]
)
def test_gradients_wait_only_where_a_step_in_two_parts_is_the_same(crew, way, waits):
    assert crew(2).run(with_and_without, way) == [([], waits)] * 2


def scale_a_gradient_that_was_dropped(rank, workers):
    run, model, optimizer = started(workers, "sgd", "none")
    loss(model, batch_of(rank, 0)).backward()
    before = model.emb.weight.grad
    optimizer.zero_grad()
    loss(model, batch_of(rank, 1)).backward()
    held = run._engine.tables["emb.weight"].gradient.clone()
    before.mul_(0.5)
    is_same = torch.equal(run._engine.tables["emb.weight"].gradient, held)
    model.emb.weight.grad.mul_(0.5)
    is_scaled = torch.equal(run._engine.tables["emb.weight"].gradient, held / 2)
    run.close()
    return is_same, is_scaled


def test_a_handle_of_a_dropped_gradient_does_not_speak_of_the_next(crew):
    assert crew(2).run(scale_a_gradient_that_was_dropped) == [(True, True)] * 2


def keep_the_model_alone(rank, workers):
    run, model, optimizer = started(workers, "sgd", "gradients")
    transport, has_waited = run._transport, 0
    with closing(run.batches(batches_of(rank, ""))) as batches:
        for step, batch in zip(range(STEPS - 1), batches, strict=False):
            plain_step(run, model, optimizer, batch, step)
            has_waited += waiting_of(run)
    run._engine.finish()
    run._engine.hooks.close()
    gone = [weakref.ref(run), weakref.ref(optimizer)]
    del run, optimizer, batches
    gc.collect()
    alive = [one() is not None for one in gone]
    with torch.no_grad():
        loss(model, batch_of(0, 3))  # alike on all ranks
    transport.close()
    return has_waited > 0, alive


def test_a_model_that_is_kept_does_not_keep_its_run_and_optimizer(crew):
    assert crew(2).run(keep_the_model_alone) == [(True, [False, False])] * 2


def take_a_table_out(rank, workers):
    """Frozen between backward and step: it is not stepped."""
    left = []
    for kind in ("rows", "gradients"):
        run, model, optimizer = started(workers, "sgd", kind)
        for step, batch in enumerate(run.batches(batches_of(rank, ""))):
            optimizer.zero_grad()
            loss(model, batch).backward()
            if step == 6:
                mine = run._engine.tables["emb.weight"].parameter
                for group in optimizer.param_groups:
                    group["params"] = [parameter for parameter in group["params"] if parameter is not mine]
            if step == 7:
                break
            optimizer.step()
        run._engine.finish()
        left.append(run._engine.tables["soft"].shard.clone())
        run.close()
    return torch.equal(*left)


def test_a_table_that_the_optimizer_holds_no_more_is_left_alone(crew):
    assert crew(2).run(take_a_table_out) == [True] * 2
