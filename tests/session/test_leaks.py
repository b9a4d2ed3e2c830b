"""A step leaves nothing behind, and neither does a run whose user has let go of it."""

import gc
import weakref
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import nn

from armillary.exchanges import build_dense
from armillary.models.gradient_hooks import on_grad_accumulated
from armillary.plans import Choice
from armillary.runtime.dense_unit import dense_unit
from armillary.schedules.cyclic import cyclic
from armillary.session.attach import attach
from armillary.session.delayed_loop import OwnLoop
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import StageReplicas, TrainSpec, in_a_row
from armillary.transport.transport import Transport
from channels import GlooChannel
from scenes import OPTIMIZERS, Mixed, batch_of, loss, plan_for
from staged_models import as_stages, data, squared_error, stages_of


def rows_that_outlive_their_step(rank, workers, exchange):
    torch.manual_seed(0)
    model = Mixed()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    run = attach(plan_for(model, workers, Choice(exchange), Choice("all_reduce")), model, optimizer)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        value = loss(model, batch_of(rank, step))
        seen += [
            weakref.ref(one.rows)
            for table in run._engine.tables.values()
            for one in table.pending
            if one.rows is not None
        ]
        value.backward()
        optimizer.step()
        del value
    gc.collect()
    run.close()
    return len(seen), sum(one() is not None for one in seen)


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows"])
def test_the_rows_of_a_look_up_die_with_their_step(crew, exchange):
    for read, alive in crew(2).run(rows_that_outlive_their_step, exchange):
        assert read > 0
        assert alive == 0


def tensors_after_each_step(rank, workers, rows, dense):
    torch.manual_seed(0)
    model = Mixed()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    rows, dense = Choice.parse(rows), Choice.parse(dense)
    plan = plan_for(model, workers, rows, dense)
    if dense.name != "all_reduce":
        plan = replace(plan, groups=tuple(replace(group, departures=("lossy",)) for group in plan.groups))
    run, counts = attach(plan, model, optimizer), []
    for _ in range(10):
        optimizer.zero_grad()
        loss(model, batch_of(rank, 1)).backward()
        optimizer.step()
        gc.collect()
        counts.append(sum(isinstance(one, torch.Tensor) for one in gc.get_objects()))
    run.close()
    return counts


@pytest.mark.parametrize(
    ("rows", "dense"),
    [
        ("owned_rows", "all_reduce"), ("gather_rows", "all_reduce"), ("quantize(bits=8)", "quantize(bits=8)"),
        ("threshold(sparsity=0.9)", "threshold(sparsity=0.9)"), ("low_rank(rank=2)", "low_rank(rank=2)"),
    ],
)  # fmt: skip
def test_a_step_leaves_no_tensor_behind(crew, rows, dense):
    for counts in crew(2).run(tensors_after_each_step, rows, dense):
        # A thread of gloo may let go of a step's tensors a step later; what stays grows from step to step.
        assert min(counts[6:]) <= min(counts[2:6]), counts


def parts_of_a_run(run):
    tables = run._engine.tables.values()
    rows = [look_up.rows for table in tables for look_up in table.pending if look_up.rows is not None]
    return [*run._model.parameters(), *run._engine.executor.units, *(table.shard for table in tables), *rows, run]


def train_and_let_go(rank, workers, exchange, prefetch, is_left_in_the_middle):
    torch.manual_seed(0)
    model = Mixed()
    optimizer = OPTIMIZERS["adam" if prefetch == "none" else "sgd"](model.parameters())
    plan = plan_for(model, workers, Choice(exchange), Choice("all_reduce"))
    if prefetch != "none":
        groups = [replace(g, prefetch=prefetch) if g.layout == "row_sharded" else g for g in plan.groups]
        plan = replace(plan, groups=tuple(groups))
    run = attach(plan, model, optimizer)
    transport = run._transport
    with closing(run.batches(batch_of(rank, step) for step in range(5))) as batches:
        for _, batch in zip(range(3), batches):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        if is_left_in_the_middle:
            loss(model, next(batches))  # rows were read, and nothing comes back of them
    return transport, [weakref.ref(part) for part in parts_of_a_run(run)]


def parts_that_outlive_their_run(rank, workers, *case):
    transport, parts = train_and_let_go(rank, workers, *case)
    gc.collect()
    transport.barrier()
    transport.close()
    return len(parts), [type(part()).__name__ for part in parts if part() is not None]


@pytest.mark.parametrize("is_left_in_the_middle", [False, True])
@pytest.mark.parametrize(
    ("exchange", "prefetch"),
    [("owned_rows", "none"), ("owned_rows", "rows"), ("owned_rows", "gradients"), ("gather_rows", "none")],
)
def test_a_run_dies_with_its_model_and_optimizer(crew, exchange, prefetch, is_left_in_the_middle):
    for count, alive in crew(2).run(parts_that_outlive_their_run, exchange, prefetch, is_left_in_the_middle):
        assert count > 10
        assert alive == []


def train_with_stale_gradients(rank, workers, kind):
    model = nn.Sequential(*stages_of(2, torch.float64))
    optimizer = OPTIMIZERS["momentum_decay"](model.parameters())
    if kind == "ring":
        schedule = cyclic(workers, 2)
        seat = in_a_row(schedule, rank, GlooChannel())
        run = Interpreter(as_stages(model), optimizer, TrainSpec(schedule, squared_error), seat)
    else:
        transport = Transport()
        unit = dense_unit("all", dict(model.named_parameters()), build_dense("all_reduce"), transport.place)
        run = OwnLoop(StageReplicas(transport.place, transport, groups={0: [unit]}).reducer(0, is_late=True), optimizer)
    for batches in data(3, workers, torch.float64):
        if kind == "ring":
            run.step([batches[rank]])
            continue
        optimizer.zero_grad()
        inputs, target = batches[rank]
        squared_error(model(inputs), target).backward()
        optimizer.step()
    run.settle()
    return [weakref.ref(part) for part in (model, run, *model.parameters())]


def weights_that_outlive_their_loop(rank, workers, kind):
    parts = train_with_stale_gradients(rank, workers, kind)
    gc.collect()
    return [type(part()).__name__ for part in parts if part() is not None]


@pytest.mark.parametrize("kind", ["ring", "delayed"])
def test_a_loop_of_stale_gradients_dies_with_its_model_and_optimizer(crew, kind):
    assert crew(2).run(weights_that_outlive_their_loop, kind) == [[], []]


class Owner:
    """Something a hook tells of a gradient."""


def test_a_gradient_that_nobody_exchanges_any_more_is_an_error():
    weight, owner = nn.Parameter(torch.ones(2)), Owner()

    def told(owner, leaf):
        owner.seen = getattr(owner, "seen", 0) + 1

    on_grad_accumulated(weight, owner, told, "head.weight")
    weight.sum().backward()
    assert owner.seen == 1
    del owner
    with pytest.raises(RuntimeError, match=r"head.weight of shape \(2,\) got a gradient that nobody exchanges"):
        weight.sum().backward()


def test_a_hook_that_holds_what_holds_its_tensor_is_never_freed():
    """Why `on_grad_accumulated` is there; if this fails, torch has learned to see such circles."""

    def circle(hook_on):
        owner = Owner()
        owner.weight = nn.Parameter(torch.ones(2))
        hook_on(owner.weight, owner, lambda here, _: here.weight)
        return weakref.ref(owner)

    def holding(tensor, owner, told):
        tensor.register_post_accumulate_grad_hook(lambda leaf: told(owner, leaf))

    kept, freed = circle(holding), circle(on_grad_accumulated)
    gc.collect()
    assert kept() is not None
    assert freed() is None
