"""One call plans for the job and attaches; what the user wishes is in the plan."""

import copy
import inspect

import pytest
import torch
from torch import nn

from armillary.planning.prefetch import prefetching
from armillary.planning.pricing import assumptions_behind
from armillary.reference.serial import train_step
from armillary.session import plan_job as decide
from armillary.session.attach import attach
from armillary.session.parallelize import auto_plan, parallelize
from armillary.session.plan_job import assumptions_of
from beside import differences
from planning_cases import machines

V, D = 300, 4


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lin = nn.Embedding(V, D), nn.Linear(D, 2)

    def forward(self, ids):
        return self.lin(torch.tanh(self.emb(ids))).square().mean()


def ids_of(worker, step):
    return torch.randint(0, V, (3 + worker,), generator=torch.Generator().manual_seed(100 * step + worker))


def loss(model, ids):
    return model(ids)


def train(rank, workers):
    torch.manual_seed(3)
    reference = Small().double()
    model = copy.deepcopy(reference)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference)]
    few = [ids_of(worker, 0) for worker in range(workers)]
    wishes = {"constraints": {"emb.weight": "owned_rows"}, "lazy": ["lin.*"], "mean": "weights"}
    run = parallelize(model, optimizers[0], few, loss, **wishes)
    for step in range(3):
        optimizers[0].zero_grad()
        run.weigh(3 + rank)
        loss(model, ids_of(rank, step)).backward()
        optimizers[0].step()
        batches = [ids_of(worker, step) for worker in range(workers)]
        train_step(reference, optimizers[1], batches, loss, weights=[3 + worker for worker in range(workers)])
    far = max(differences(run, model, reference).values())
    said = run.plan.mean, run.plan.group_of("emb.weight").exchange.name, run.plan.notes[0]
    run.close()
    return far, said


def test_wishes_are_in_the_plan_and_training_is_that_of_one_process(crew):
    for far, (mean, exchange, note) in crew(2).run(train):
        assert far < 1e-10
        assert (mean, exchange) == ("weights", "owned_rows")
        assert note == "lazy was allowed but is not used, since they travel whole: lin.bias, lin.weight"


def prefetch(rank, workers):
    """Two trainings, plain and by a plan that prefetches; and what else a rank can do with what was decided."""
    finals, kinds = [], []
    for ahead in (False, True):
        torch.manual_seed(3)
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        few = [ids_of(worker, 0) for worker in range(workers)]
        run = parallelize(model, optimizer, few, loss, constraints={"emb.weight": "owned_rows"}, prefetch=ahead)
        for ids in run.batches(ids_of(rank, step) for step in range(6)):
            optimizer.zero_grad()
            loss(model, ids).backward()
            optimizer.step()
        whole = run.export()
        finals.append(whole and whole["model"])
        kinds.append(run.plan.group_of("emb.weight").prefetch)
        run.close()
    return finals, kinds


def test_one_call_plans_with_prefetch_which_changes_no_bit(crew):
    found = crew(2).run(prefetch)
    assert all(kinds[0] == "none" and kinds[1] != "none" for _, kinds in found)
    (plain, ahead), _ = found[0]
    assert plain.keys() == ahead.keys() and all(torch.equal(plain[name], ahead[name]) for name in plain)


def take_steps(rank, workers):
    torch.manual_seed(3 + rank)  # ranks measure and time differently, too
    model = Small()
    optimizer = torch.optim.Adagrad(model.parameters())
    decided = auto_plan(
        model, optimizer, [ids_of(w, 0) for w in range(workers)], loss, constraints={"emb.weight": "owned_rows"}
    )
    ahead = prefetching(decided.plan, decided.profile, decided.topology)
    run = attach(ahead, model, optimizer)  # refuses a plan that another rank has not
    for ids in run.batches(ids_of(rank, step) for step in range(4)):
        optimizer.zero_grad()
        loss(model, ids).backward()
        optimizer.step()
    run.close()
    return decided.plan.to_json(), assumptions_behind(ahead) == assumptions_of(optimizer)


def test_what_is_decided_in_a_job_is_the_same_on_every_rank_and_goes_on_to_every_step(crew):
    (plan, knows_optimizer), (other, _) = crew(2).run(take_steps)
    assert plan == other and knows_optimizer


def decay_the_table(rank, workers):
    torch.manual_seed(3)
    model = Small()
    groups = [{"params": model.lin.parameters()}, {"params": model.emb.parameters(), "weight_decay": 1e-5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    few = [torch.arange(50) + 50 * worker for worker in range(workers)]
    with pytest.MonkeyPatch.context() as patch:  # links on which rows would go early
        patch.setattr(decide, "measure", lambda transport: machines(1, workers, megabits=1.0))
        run = parallelize(model, optimizer, few, loss, constraints={"emb.weight": "owned_rows"}, prefetch=True)
    said = run.plan.group_of("emb.weight").prefetch
    run.close()
    return said


def test_one_call_never_plans_what_it_refuses_where_a_later_group_moves_quiet_rows(crew):
    assert crew(2).run(decay_the_table) == ["ids", "ids"]


def step_by_closure(rank, workers, has_batches):
    torch.manual_seed(3)
    model = nn.Linear(4, 2).double()
    reference = copy.deepcopy(model)
    optimizer, truth = (torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in (model, reference))

    def loss_of(one, batch):
        return one(batch).square().mean()

    def batch_of(worker, step):
        draw = torch.Generator().manual_seed(100 * step + worker)
        return torch.randn(3, 4, generator=draw, dtype=torch.float64)

    everyones = [batch_of(worker, 0) for worker in range(workers)]
    run = parallelize(model, optimizer, *((everyones, loss_of) if has_batches else ()))
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            value = loss_of(model, batch_of(rank, step))
            value.backward()
            return value

        def true_closure(step=step):
            truth.zero_grad()
            value = sum(loss_of(reference, batch_of(worker, step)) for worker in range(workers)) / workers
            value.backward()
            return value

        optimizer.step(closure)
        truth.step(true_closure)
    run.close()
    return max(float((mine - one).abs().max()) for mine, one in zip(model.parameters(), reference.parameters()))


@pytest.mark.parametrize("has_batches", [True, False])
def test_one_call_plans_for_an_optimizer_that_steps_by_a_closure(crew, has_batches):
    assert max(crew(2).run(step_by_closure, has_batches)) < 1e-10


def test_help_has_a_line_for_every_argument():
    lines = inspect.getdoc(parallelize).splitlines()
    told = {name.strip() for line in lines if ": " in line for name in line.split(": ")[0].split(",")}
    assert set(inspect.signature(parallelize).parameters) - {"optimizer"} <= told
    assert any(" optimizer: " in line for line in lines)  # beside the model
