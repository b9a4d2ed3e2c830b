"""Optimizers that mix rows are found out, whatever they mix by. Their tables stay whole; all is as in one process."""

import copy
import random
from functools import cache

import pytest
import torch
from odd_optimizers import BY_ROW, MIXING, WHOLE, Clipped, around_sgd
from plain_loop import differ, state_of, train
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

import armillary
import face

ROWS, WIDTH, STEPS = 40, 16, 5
TABLE = "0.weight"


def made(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH), nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch_of(rank, step):
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(ROWS, (6, 3), generator=draw), torch.randint(3, (6,), generator=draw)


def loss(model, batch):
    return 20 * functional.cross_entropy(model(batch[0]), batch[1])


@cache
def seen(dtype):
    """The profile, which knows no optimizer."""
    return armillary.profile(made(dtype), [batch_of(rank, 0) for rank in range(2)], loss, workers=2)


def planned(make, constraint=None, dtype=torch.float64, **asked):
    """By price, or with rows spread."""
    model = made(dtype)
    assumptions = armillary.assumptions_of(make(model.parameters()), model)
    wished = {} if constraint is None else {TABLE: constraint}
    return armillary.plan(seen(dtype), face.machines(2), constraints=wished, assumptions=assumptions, **asked)


def refused(kind, make, wish):
    kind = "Around" if kind == "AroundClipped" else kind
    with pytest.raises(ValueError, match=f"{TABLE}.*: {kind} ") as caught:
        planned(make, wish)
    assert "element-wise" in str(caught.value)


@pytest.mark.parametrize("kind", MIXING)
def test_what_mixes_rows_is_not_spread(kind):
    make = MIXING[kind]
    plan = planned(make)
    assert all(group.layout == "replicated" for group in plan.groups)
    assert f"not spread by row: {kind}" in " ".join(plan.notes)
    refused(kind, make, "row_sharded")
    with pytest.raises(ValueError, match=f"{TABLE}.*lazy.*{kind}"):
        planned(make, lazy=[TABLE])
    assert face.exchanges_of(planned(make, "gather_rows"))[TABLE] == "gather_rows"  # whole with everyone
    assert face.exchanges_of(planned(make, rule="parallax"))[TABLE] == "all_reduce"


@pytest.mark.parametrize("kind", WHOLE)
def test_what_holds_its_parameters_itself_or_cannot_be_tried_stays_whole(kind):
    if kind == "Together":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    plan = planned(WHOLE[kind])
    assert set(face.exchanges_of(plan).values()) == {"all_reduce"}
    assert "not spread by row: " in " ".join(plan.notes)
    for wish in ("row_sharded", "gather_rows"):
        refused(kind, WHOLE[kind], wish)


@pytest.mark.parametrize("kind", BY_ROW)
def test_what_steps_each_row_by_itself_is_spread_where_asked(kind):
    dtype = torch.float32 if kind == "Floats" else torch.float64
    plan = planned(BY_ROW[kind], "row_sharded", dtype)
    assert face.exchanges_of(plan)[TABLE] == "owned_rows"
    assert "not spread" not in " ".join(plan.notes)


def test_the_reason_tells_what_stopped_the_trial():
    assert "Unlike: a tensor of another shape" in " ".join(planned(WHOLE["KnownShapes"]).notes)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    assert "asks other ranks in its step (allreduce)" in " ".join(planned(WHOLE["Together"]).notes)


@pytest.mark.parametrize("make", [Clipped, around_sgd, torch.optim.Adagrad, lambda p: torch.optim.SparseAdam(list(p))])
def test_a_trial_leaves_no_trace(make):
    """Gradients are there, as in the loop's second step, so what steps the user's own tensors would show."""
    model = made()
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    heard = register_optimizer_step_post_hook(lambda *_: pytest.fail("a trial's step was heard"))
    before = state_of(model), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state(), random.getstate()
    armillary.assumptions_of(optimizer, model)
    heard.remove()
    assert differ(before[0], state_of(model), 0.0) == {}
    assert str(before[1]) == str(optimizer.state_dict())
    assert torch.equal(before[2], torch.get_rng_state()) and before[3] == random.getstate()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())


def one_line(rank, world, kind, constraints):
    model = made()
    optimizer = {**MIXING, **WHOLE, **BY_ROW}[kind](model.parameters())
    try:
        run = armillary.parallelize(model, optimizer, constraints=constraints)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, batch_of(rank, step)).backward()
            optimizer.step()
        notes = " ".join(run.plan.notes)
        run.close()
    except ValueError as error:
        return str(error), None
    return notes, state_of(model)


def one_process(kind):
    model = made()
    optimizer = {**MIXING, **WHOLE, **BY_ROW}[kind](model.parameters())
    train(model, optimizer, loss, [[batch_of(rank, step) for rank in range(2)] for step in range(STEPS)])
    return state_of(model)


RUNS = [
    *((kind, {}) for kind in (
        "LayerProjected", "Clipped", "Factored", "Adafactor", "Picky", "Around", "Together", "Listing", "OwnDict",
    )),
    *((kind, {"*": "gather_rows"}) for kind in ("ChannelProjected", "Adafactor", "RowWise")),
    *((kind, {"*": "row_sharded"}) for kind in ("Picky", "Lion")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "constraints"), RUNS)
def test_it_trains_as_one_process(crew, kind, constraints):
    truth = one_process(kind)
    for notes, state in crew(2).run(one_line, kind, constraints):
        assert state is not None, notes
        assert differ(state, truth, 1e-12) == {}


@pytest.mark.parametrize("kind", ["LayerProjected", "Clipped", "Adafactor", "Together"])
def test_rows_that_are_asked_for_are_refused_by_name_on_every_rank(crew, kind):
    for said, state in crew(2).run(one_line, kind, {TABLE: "row_sharded"}):
        assert state is None
        assert TABLE in said and f"{kind} " in said and "row" in said


def by_hand(rank, world, plan):
    model = made()
    optimizer = Clipped(model.parameters())
    with pytest.raises(ValueError, match=rf"{TABLE}.*Clipped steps a matrix.*split by row.*'replicated'"):
        armillary.attach(plan, model, optimizer)
    return True


def test_a_plan_for_another_optimizer_is_refused(crew):
    assert all(crew(2).run(by_hand, planned(torch.optim.Adam, "row_sharded")))


def spread_by_itself(rank, world):
    model = made()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    said = []
    for asked in ((), ([batch_of(rank, 0), batch_of(rank, 1)], loss)):
        with pytest.raises(ValueError, match="ZeroRedundancyOptimizer") as caught:
            armillary.parallelize(model, optimizer, *asked, timeout=20, report_after=3)
        said.append(str(caught.value))
    return said


def test_an_optimizer_that_spreads_its_state_itself_is_refused_by_name(crew):
    for said in crew(2).run(spread_by_itself):
        assert all("torch.optim.Adam" in one for one in said)


def refused_stages(make):
    """One worker is enough to be refused."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    draw = torch.Generator().manual_seed(0)
    data = [torch.randn(2, 4, generator=draw, dtype=torch.float64) for _ in range(4)]
    with pytest.raises(ValueError, match=r"gpipe|sparse") as caught:
        armillary.parallelize(
            model, make(model.parameters()), data, lambda model, batch: model(batch).square().mean(),
            schedule=armillary.Choice.parse("gpipe(micro_batches=2)"),
        )  # fmt: skip
    return str(caught.value)


@pytest.mark.parametrize("kind", ["Clipped", "Shared", "Together", "SparseAdam"])
def test_stages_are_not_stepped_apart_by_what_steps_parameters_together(kind):
    make = {**MIXING, **WHOLE, "SparseAdam": lambda params: torch.optim.SparseAdam(list(params))}[kind]
    assert kind in refused_stages(make)
