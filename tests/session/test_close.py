"""After close, after a refused attach and after an exception the process is as before, and the model is plain."""

import contextlib
import copy
import gc
import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import armillary
from armillary.plans import Choice
from armillary.session.undo import rollback_on_error
from scenes import Mixed, batch_of, loss, plan_for

STEPS = 3


def surroundings(model, optimizer, scaler):
    """What a run may touch of its process, without the run's own tensors."""
    tasks = os.listdir("/proc/self/task")
    hooks = [
        len(owner.__dict__.get(name) or ())
        for owner in (model, optimizer, *model.modules())
        for name in sorted(owner.__dict__)
        if "hooks" in name
    ]
    of_parameters = [
        len(p.__dict__.get("_post_accumulate_grad_hooks") or ()) + len(p._backward_hooks or ())
        for p in model.parameters()
        if type(p) is nn.Parameter
    ]
    return {
        "policy": os.sched_getscheduler(0),
        "processors": os.sched_getaffinity(0),
        "of threads": set(filter(None, map(scheduled, tasks))),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(tasks),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "hooks": sum(hooks) + sum(of_parameters),
        "scaler": sorted(vars(scaler)),
        "excepthook": sys.excepthook,
        "store": {key for key in dist.distributed_c10d._get_default_store().list_keys() if "armillary" in key},
    }


def scheduled(task):
    """Nothing of a thread that has just ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.sched_getscheduler(int(task)), tuple(os.sched_getaffinity(int(task)))


def settled(before, *parts):
    """Threads of a group that was given back take a moment to end."""
    gc.collect()
    for _ in range(100):
        after = surroundings(*parts)
        after["store"] |= before["store"]  # those of an earlier run may be on their way out
        if after == before:
            break
        time.sleep(0.02)
    return {name: f"{before[name]}, then {after[name]}" for name in before if before[name] != after[name]}


def begun(rank, workers, rows):
    torch.manual_seed(0)
    model = Mixed().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    plan = plan_for(model, workers, Choice(rows), Choice("all_reduce"))
    gc.collect()  # what runs of earlier tests have left in this process is given back now, not while it is compared
    dist.barrier()
    return model, optimizer, scaler, plan


def train_and_close(rank, workers, rows, ending):
    model, optimizer, scaler, plan = begun(rank, workers, rows)
    names, parameters = zip(*model.named_parameters(), strict=True)
    before, state = surroundings(model, optimizer, scaler), torch.get_rng_state()
    run = armillary.attach(plan, model, optimizer, scaler=scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, batch_of(rank, step)).backward()
        optimizer.step()
    exported = run.export()
    if ending == "close":
        run.close()
    else:
        with pytest.raises(KeyError), run:
            raise KeyError("in the loop")
    is_random_as_before = torch.equal(state, torch.get_rng_state())
    left = settled(before, model, optimizer, scaler)
    if ending != "close":
        return left, is_random_as_before
    same = [mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True)]
    assert [name for name, _ in model.named_parameters()] == list(names)
    assert all(same), "parameters keep their identity"
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, parameters))
    whole = [copy.deepcopy(exported)]
    dist.broadcast_object_list(whole)
    assert optimizer.state_dict()["state"].keys() == whole[0]["optimizer"]["state"].keys()
    for mine, theirs in (
        (model.state_dict(), whole[0]["model"]),
        *((mine, whole[0]["optimizer"]["state"][n]) for n, mine in optimizer.state_dict()["state"].items()),
    ):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine)
    optimizer.zero_grad()
    loss(model, batch_of(0, 9)).backward()  # a plain model, in a plain loop
    optimizer.step()
    with pytest.raises(RuntimeError, match="the run was closed; attach again"):
        run.export()
    return left, is_random_as_before


@pytest.mark.parametrize("ending", ["close", "exception"])
@pytest.mark.parametrize("rows", ["owned_rows", "gather_rows"])
def test_after_its_end_a_run_leaves_no_trace(crew, rows, ending):
    for left, is_random_as_before in crew(4).run(train_and_close, rows, ending):
        assert left == {}
        assert is_random_as_before


def refuse(rank, workers):
    model, optimizer, scaler, plan = begun(rank, workers, "owned_rows")
    held = list(model.parameters())
    other = nn.Linear(2, 2)
    before, state = surroundings(model, optimizer, scaler), torch.get_rng_state()
    with pytest.raises(ValueError, match="the plan was made for another model"):
        armillary.attach(plan, other, torch.optim.SGD(other.parameters(), 0.1), scaler=scaler)
    model.register_buffer("seen", torch.zeros(1 + rank))
    with pytest.raises(ValueError, match="build the same model on every rank"):
        armillary.attach(plan, model, optimizer, scaler=scaler)
    del model._buffers["seen"]
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), held, strict=True))
    return settled(before, model, optimizer, scaler), torch.equal(state, torch.get_rng_state())


def test_a_refused_attach_leaves_no_trace(crew):
    for left, is_random_as_before in crew(4).run(refuse):
        assert left == {}
        assert is_random_as_before


def leave_tables_out(rank, workers):
    model, optimizer, _, plan = begun(rank, workers, "owned_rows")
    run = armillary.attach(plan, model, optimizer)
    loss(model, batch_of(rank, 0)).backward()
    optimizer.step()
    run.close(gather=False)
    run.close()
    with pytest.raises(RuntimeError, match="closed with gather=False") as caught:
        loss(model, batch_of(rank, 0))
    return str(caught.value)


def test_tables_that_are_left_out_say_so_when_they_are_read(crew):
    for message in crew(2).run(leave_tables_out):
        assert "emb.weight" in message and "gather=True" in message


def raise_on_one_rank(rank, workers):
    model, optimizer, _, plan = begun(rank, workers, "owned_rows")
    began = time.monotonic()
    run = armillary.attach(plan, model, optimizer)

    def train():
        with run:
            for step in range(STEPS):
                optimizer.zero_grad()
                value = loss(model, batch_of(rank, step))
                if (rank, step) == (1, 1):
                    raise KeyError("no such word")
                value.backward()
                optimizer.step()

    with pytest.raises((KeyError, RuntimeError)) as caught:
        train()
    with pytest.raises(RuntimeError, match="the run ended on rank"):
        run.save("nowhere")
    return str(caught.value), time.monotonic() - began


def test_an_exception_of_one_rank_is_quoted_by_the_others_at_once(crew):
    mine, other = crew(2).run(raise_on_one_rank)
    assert "no such word" in other[0]
    assert "The first error was on rank 1: KeyError: 'no such word'" in mine[0]
    assert mine[1] < 30


def step_and_count(rank, workers, micro_batches):
    torch.manual_seed(0)
    model = Mixed().double()
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin))
    plan = plan_for(model, workers, Choice("owned_rows"), Choice("all_reduce"))
    with armillary.attach(plan, model, optimizer, loss=loss) as run:
        for step in range(STEPS):
            cells = [(w, m) for w in range(workers) for m in range(micro_batches)]
            plain.zero_grad()
            for w, m in cells:
                (loss(twin, batch_of(w, 10 * step + m)) / len(cells)).backward()
            plain.step()
            (found,) = run.step([batch_of(rank, 10 * step + m) for m in range(micro_batches)])
            assert (found.step, len(found.losses)) == (step, micro_batches)
        text = str(run.report())
    far = max(float((mine - true).norm()) for mine, true in zip(model.parameters(), twin.parameters(), strict=True))
    return far, text


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_of_a_run_takes_the_mean_over_its_micro_batches(crew, micro_batches):
    for far, text in crew(2).run(step_and_count, micro_batches):
        assert far < 1e-10
        assert text.startswith("after 3 steps") and "owned_rows" in text


def step_without_a_loss(rank, workers):
    model, optimizer, _, plan = begun(rank, workers, "owned_rows")
    with armillary.attach(plan, model, optimizer) as run, pytest.raises(ValueError, match="give loss=") as caught:
        run.step([batch_of(rank, 0)])
    return str(caught.value)


def step_under_a_scaler(rank, workers):
    model, optimizer, scaler, plan = begun(rank, workers, "owned_rows")
    run = armillary.attach(plan, model, optimizer, loss=loss, scaler=scaler)
    with run, pytest.raises(ValueError, match="a loop of your own") as caught:
        run.step([batch_of(rank, 0)])
    return str(caught.value)


def test_a_step_under_a_scaler_is_refused_by_name(crew):
    assert all("bfloat16" in message for message in crew(2).run(step_under_a_scaler))


def test_a_step_without_a_loss_is_refused_by_name(crew):
    assert all("run.step" in message for message in crew(2).run(step_without_a_loss))


def test_an_error_while_a_plan_begins_leaves_parameters_optimizer_and_random_state_as_they_were():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    weight, values, state = model.weight, model.weight.detach().clone(), dict(optimizer.state[model.weight])
    stream = torch.get_rng_state()

    def begin():
        with rollback_on_error(model, optimizer):
            model.weight.data = torch.empty(0)  # as of a stage that lies on another rank
            optimizer.param_groups[0]["params"][:] = [nn.Parameter(torch.rand(1))]
            optimizer.state.clear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        begin()
    assert model.weight is weight and torch.equal(weight, values) and optimizer.state[weight] == state
    assert [*map(id, optimizer.param_groups[0]["params"])] == [*map(id, model.parameters())]
    assert torch.equal(torch.get_rng_state(), stream)
