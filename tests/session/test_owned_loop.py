"""Schedules that own the loop behind the one run: equal to one process bit for bit, saved, resumed, closed."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import armillary
import face
from armillary.planning.planner import plan
from armillary.plans import Choice, Link, Topology
from armillary.profiler.profiler import profile
from armillary.reference.versions import Reference, WorkersReference
from armillary.schedules import options_of, read
from owned import loss, optimizer_of, same

WIDTH, ROWS, STEPS = 4, 3, 4
FLUSHED = [("gpipe", {"micro_batches": 3}, 2), ("one_f_one_b", {"micro_batches": 3}, 2),
           ("gpipe", {"micro_batches": 2}, 3), ("one_f_one_b", {"micro_batches": 4}, 3),
           ("accumulation", {"micro_batches": 3}, 1), ("accumulation", {"micro_batches": 2}, 2)]  # fmt: skip
STALE = [("pipeline", {}, 2), ("pipeline", {"micro_batches": 3, "slack": 1}, 2),
         ("one_device", {"micro_batches": 2}, 1),
         ("one_device", {"micro_batches": 2}, 2), ("ring", {}, 2), ("ring", {"slack": 2}, 2), ("zero_ring", {}, 2),
         ("shared_stages", {}, 3), ("delayed_all_reduce", {}, 2)]  # fmt: skip
SLACKS = [(name, {**options, "slack": slack}, workers) for name, options, workers in STALE[:-1] for slack in (0, 1, 2)]
EVERY = [*FLUSHED, *STALE]
NAMES = [f"{name}-{'-'.join(f'{k}{v}' for k, v in options.items())}-{workers}" for name, options, workers in EVERY]
CLIPPED = [
    ("gpipe", {"micro_batches": 2, "clip_norm": 0.1}, 2),
    ("accumulation", {"micro_batches": 2, "clip_norm": 0.1}, 1),
]


def model_of(dtype=torch.float64):
    """Four blocks with dropout, so that every place must draw its own numbers, whatever the schedule."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)]
    return nn.Sequential(*blocks).to(dtype)


def batch_of(step, micro_batch, dtype=torch.float64):
    draw = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + micro_batch))
    return draw.to(dtype).unbind()


def plan_of(name, options, workers, dtype=torch.float64):
    link = Link(1e-4, 1e8)
    facts = profile(model_of(dtype), [batch_of(0, 0, dtype)] * workers, loss, workers=workers)
    return plan(facts, Topology(1, workers, link, link, 1 << 33), schedule=Choice(name, options))


def given(found, step, rank, workers, dtype=torch.float64):
    return [batch_of(step, micro_batch, dtype) for micro_batch in found.handed_in(rank, workers)]


class Whole(nn.Module):
    """A model and its loss as one stage."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return loss(self.model, batch)


def falling(optimizer):
    """The rate is a tenth from the middle on."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [STEPS // 2], 0.1)


def halved(is_on):
    return torch.autocast("cpu", torch.bfloat16, enabled=is_on)


def truth(made, steps, drains=(), dtype=torch.float64, is_half=False):
    """(weights, optimizer state, losses by step and micro-batch) of one process after so many steps."""
    model = model_of(dtype)
    optimizer, found = optimizer_of(model), options_of(made)
    rate = falling(optimizer)
    workers = made.workers
    if not found.method.is_cut:
        stages, of = [Whole(model)], lambda value, batch: value
    else:
        cut = 4 // found.stages
        stages = [nn.Sequential(*list(model)[first : first + cut]) for first in range(0, cut * found.stages, cut)]
        if found.stages * cut < 4:
            stages[-1] = nn.Sequential(*stages[-1], *list(model)[found.stages * cut :])
        of = functional.mse_loss
    if found.method.replicates_table and workers > 1:
        of_batch = (lambda v, t: functional.mse_loss(v, t[1])) if found.method.is_cut else of
        reference = WorkersReference(stages, optimizer, found.schedule(), of_batch, 5)
    else:
        reference = Reference(stages, optimizer, found.schedule(), of, 5, None, found.clip)
    losses = []
    for step in range(steps):
        if step in drains:
            reference.drain()
        batches = [batch_of(step, m, dtype) for m in range(found.total(workers))]
        with halved(is_half):
            if isinstance(reference, WorkersReference):
                is_cut, each = found.method.is_cut, found.micro_batches
                pairs = [(batch[0] if is_cut else batch, batch) for batch in batches]
                by_worker = reference.step([pairs[first : first + each] for first in range(0, len(pairs), each)])
                losses.append([one for mine in by_worker for one in mine])
            else:
                pairs = batches if found.method.is_cut else [(batch, batch) for batch in batches]
                losses.append(reference.step(pairs))
        rate.step()
    return model.state_dict(), optimizer.state_dict(), losses


def apart(these, those):
    """Names of what is not equal."""
    return [key for key in those if key not in these or not same(these[key], those[key])]


def train_and_close(rank, world, made, dtype, is_half=False):
    model = model_of(dtype)
    optimizer, found = optimizer_of(model), options_of(made)
    originals, state = list(model.parameters()), torch.get_rng_state()
    groups = len(dist.distributed_c10d._world.pg_map)
    run = armillary.attach(made, model, optimizer, loss=loss, example=batch_of(0, 0, dtype), seed=5)
    heard, rate = [], falling(optimizer)
    for step in range(STEPS):
        with halved(is_half):
            heard.append(run.step(given(found, step, rank, world, dtype)))
        rate.step()
    heard.append(run._engine.drained())
    exported = run.export()
    run.close()
    whole = [copy.deepcopy(exported)]
    dist.broadcast_object_list(whole)
    kept = [mine is theirs for mine, theirs in zip(model.parameters(), originals, strict=True)]
    plain = same(dict(model.state_dict()), dict(whole[0]["model"])) and same(
        optimizer.state_dict()["state"], whole[0]["optimizer"]["state"]
    )
    assert all(kept), "parameters keep their identity"
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, originals))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    optimizer.zero_grad()
    loss(model, batch_of(0, 0, dtype)).backward()  # a plain loop goes on
    optimizer.step()
    steps = [(one.step, [float(loss) for loss in one.losses]) for some in heard for one in some]
    return exported, steps, plain


KINDS = {"double": (torch.float64, False), "single": (torch.float32, False), "half": (torch.float32, True)}
TRAINED = [
    *((*case, "double") for case in [*EVERY, *CLIPPED]),
    *((*case, "single") for case in [*FLUSHED, *CLIPPED]),
    *((*case, "half") for case in STALE),  # as single, under autocast
    *((*case, "double") for case in SLACKS if case not in EVERY and case[1]["slack"]),
]


@pytest.mark.parametrize(("name", "options", "workers", "kind"), TRAINED)
def test_a_run_equals_one_process_bit_for_bit_and_leaves_a_plain_model(crew, name, options, workers, kind):
    dtype, is_half = KINDS[kind]
    made = plan_of(name, options, workers, dtype)
    found = crew(workers).run(train_and_close, made, dtype, is_half)
    weights, state, losses = truth(made, STEPS, dtype=dtype, is_half=is_half)
    exported = found[0][0]
    assert apart(exported["model"], weights) == []
    assert apart(exported["optimizer"]["state"], state["state"]) == []
    assert all(plain for _, _, plain in found)
    options_found = read(made.schedule, workers)
    for rank, (_, steps, _) in enumerate(found):
        assert [step for step, _ in steps] == list(range(STEPS)), f"rank {rank}"
        for step, mine in steps:
            wanted = [float(losses[step][m]) for m in options_found.handed_in(rank, workers)]
            assert mine == wanted, f"rank {rank}, step {step}"


def test_another_slack_is_another_rule():
    """So the comparison above can tell the rules apart."""
    for name, options, workers in STALE[:-1]:
        finals = [truth(plan_of(name, {**options, "slack": slack}, workers), STEPS)[0] for slack in (0, 1, 2)]
        assert all(apart(one, other) for one, other in itertools.pairwise(finals)), name


def save_and_resume(rank, world, made, folder):
    found = options_of(made)
    model = model_of()
    with armillary.attach(made, model, optimizer_of(model), loss=loss, example=batch_of(0, 0), seed=5) as run:
        for step in range(2):
            run.step(given(found, step, rank, world))
        path = run.save(folder, loop={"rank": rank})
        for step in range(2, STEPS):
            run.step(given(found, step, rank, world))
        unbroken = run.export()
        scores = run.evaluate([batch_of(50 + rank, 0)], lambda net, batch: {"sum": float(loss(net, batch)), "n": 1.0})
        text = str(run.report())
    other = model_of()
    with armillary.attach(made, other, optimizer_of(other), loss=loss, example=batch_of(0, 0), seed=5) as run:
        run.step(given(found, 7, rank, world))  # of another training, which is given up
        loop = run.load(path)
        for step in range(2, STEPS):
            run.step(given(found, step, rank, world))
        resumed = run.export()
    return (
        (same(resumed, unbroken), loop, scores["n"], text.splitlines()[0])
        if rank == 0
        else (True, loop, scores["n"], "")
    )


@pytest.mark.parametrize(("name", "options", "workers"), EVERY, ids=NAMES)
def test_a_run_that_is_resumed_goes_on_as_if_unbroken(crew, name, options, workers, tmp_path):
    for rank, (is_same, loop, scored, text) in enumerate(
        crew(workers).run(save_and_resume, plan_of(name, options, workers), str(tmp_path))
    ):
        assert is_same
        assert loop == {"rank": rank}
        assert scored == workers
        assert rank or text.startswith("after 4 steps; a step took ")


def resume_elsewhere(rank, world, path, made):
    found = options_of(made)
    model = model_of()
    with armillary.attach(made, model, optimizer_of(model), loss=loss, example=batch_of(0, 0), seed=5) as run:
        loop = run.load(path)
        exported = run.export()
        run.step(given(found, 2, rank, world) if found.method.owns_loop else [batch_of(2, rank)])
    return exported, loop


@pytest.mark.parametrize("elsewhere", [("ring", {}, 2), ("gpipe", {"micro_batches": 2}, 3), ("simultaneous", {}, 2)])
def test_what_was_saved_under_one_plan_opens_under_another(crew, elsewhere, tmp_path):
    name, options, workers = elsewhere
    crew(2).run(save_and_resume, plan_of("pipeline", {}, 2), str(tmp_path))
    path = next(Path(tmp_path).glob("step-*"))
    exported, loop = crew(workers).run(resume_elsewhere, str(path), plan_of(name, options, workers))[0]
    weights, state, _ = truth(plan_of("pipeline", {}, 2), 2)  # the rate has not fallen yet
    assert same(dict(exported["model"]), dict(weights))
    assert same(exported["optimizer"]["state"], state["state"])
    assert loop == {"rank": 0}


def refusals(rank, world, made):
    said = []

    def refused(act):
        with pytest.raises(ValueError, match=r"run|attach") as caught:
            act()
        said.append(str(caught.value))

    def attached(**fields):
        model = model_of()
        return armillary.attach(made, model, optimizer_of(model), **fields)

    refused(lambda: attached())
    refused(lambda: attached(loss=loss))
    scaler = torch.amp.GradScaler("cpu")
    refused(lambda: attached(loss=loss, example=batch_of(0, 0), scaler=scaler))
    with attached(loss=loss, example=batch_of(0, 0)) as run:
        refused(lambda: run.step(["no batch"]))
        refused(lambda: run.step({"inputs": 1, "targets": 2}))
        refused(lambda: run.step([batch_of(rank, 0), batch_of(0, 1)]))
        refused(run.no_sync)
        refused(lambda: run.weigh(1.0))
        refused(lambda: run.batches([]))
        assert list(run.shard([1, 2, 3])) == [1, 2, 3]
    return said


def test_what_a_schedule_that_owns_the_loop_cannot_do_is_refused_by_name(crew):
    for said in crew(2).run(refusals, plan_of("pipeline", {}, 2)):
        for text, wanted in zip(said, (
            "needs loss and example", "needs example", "cannot have a GradScaler", "hands in 2 micro-batches a step",
            "was given a dict; want a list with a batch for each",
            "ranks 0 and 1 hand in the same micro-batches [0, 1]", "run.no_sync", "run.weigh", "run.batches",
        ), strict=True):  # fmt: skip
            assert wanted in text


def broken_loss(model, batch):
    found = loss(model, batch)
    if batch[0][0, 0] > 1e6:
        raise ArithmeticError("no such batch")
    return found


def break_a_step(rank, workers, name, options):
    """All ranks meet the error; what they call then says so, and does not train on."""
    model = model_of()
    optimizer = optimizer_of(model)
    example = batch_of(0, 0)
    run = armillary.attach(plan_of(name, options, workers), model, optimizer, loss=broken_loss, example=example)
    mine = [batch_of(0, number) for number in range(options["micro_batches"])]
    run.step(mine)
    mine[-1] = (torch.full_like(mine[-1][0], 1e9), mine[-1][1])
    with pytest.raises(ArithmeticError, match="no such batch"):
        run.step(mine)
    said = []
    for call in (lambda: run.step(mine), run.export, run.close):
        with pytest.raises(RuntimeError) as caught:
            call()
        said.append(str(caught.value))
    run._give_up(ArithmeticError())
    return said


@pytest.mark.parametrize(("name", "options"), [("gpipe", {"micro_batches": 2}), ("accumulation", {"micro_batches": 2})])
def test_after_a_step_that_ended_in_an_error_every_call_says_so(crew, name, options):
    for said in crew(1).run(break_a_step, name, options):
        for one in said:
            assert (
                "a step ended in an error (ArithmeticError: no such batch), and what it still had to do is lost" in one
            )


class Skipping(nn.Module):
    """No chain: it is cut by tracing, for batches of one form."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        return self.second(torch.tanh(self.first(value))) + value


def traced_model():
    torch.manual_seed(4)
    return Skipping().double()


def with_a_short_batch(run, model, whole):
    with pytest.raises(ValueError, match="the model was traced for a batch of"):
        run.step([*whole[:-1], [part[:-1] for part in whole[-1]]])


def with_a_gradient(run, model, whole):
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="gradients that no schedule made"):
        run.step(whole)
    parameter.grad = None


def go_on(rank, workers, made, refused):
    """Exports of two runs that take the same steps, one of them with something refused in between."""
    found = []
    for offend in (refused, None):
        model = traced_model()
        run = armillary.attach(made, model, optimizer_of(model), loss=loss, example=batch_of(0, 0))
        for step in range(STEPS):
            run.step(given(options_of(made), step, rank, workers))
            if offend is not None:
                offend(run, model, given(options_of(made), step, rank, workers))
                run.export()
        run.close()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def with_a_forward_of_its_own(run, model, whole):
    with pytest.raises(
        RuntimeError, match=r"the model was called on rank \d, but under schedule gpipe \w+\.weight is on"
    ):
        loss(model, whole[0]).backward()
    assert run.evaluate(whole, lambda model, batch: {"loss": float(loss(model, batch))})["loss"] > 0


@pytest.mark.parametrize("refused", [with_a_short_batch, with_a_gradient, with_a_forward_of_its_own])
def test_what_is_refused_before_a_step_has_begun_breaks_nothing(crew, refused):
    asked = Choice("gpipe", {"micro_batches": 2, "points": ["second"]})
    made = face.plan_for(traced_model(), loss, [batch_of(0, 0), batch_of(0, 1)], 2, schedule=str(asked))
    assert crew(2).run(go_on, made, refused) == [True, True]


def step_without_a_loss(rank, workers, made):
    model = model_of()
    with armillary.attach(made, model, optimizer_of(model)) as run:
        with pytest.raises(ValueError, match="nobody said what the loss is"):
            run.step([batch_of(0, rank)])
        run.export()
    return True


def test_a_step_that_was_refused_as_nobody_gave_the_loss_breaks_nothing(crew):
    assert crew(2).run(step_without_a_loss, plan_of("delayed_all_reduce", {}, 2)) == [True, True]
