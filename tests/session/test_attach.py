"""What attach refuses, each with its message and on every rank; what it finds out about an optimizer."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from armillary.plans import Choice, Group
from armillary.reference.serial import train_step
from armillary.session import attach as attaching
from beside import adam, close, differences, fingerprint, pair, plan_of, sgd

V, D = 11, 4
OWNED = {"emb.weight": "owned_rows"}


class Small(nn.Module):
    def __init__(self, width=D):
        super().__init__()
        self.emb, self.lin = nn.Embedding(V, width), nn.Linear(width, 2)

    def forward(self, ids):
        return self.lin(torch.tanh(self.emb(ids))).square().sum()


def ids_of(worker, step):
    return torch.randint(0, V, (5,), generator=torch.Generator().manual_seed(100 * step + worker))


def loss(model, ids):
    return model(ids)


class Muonish(torch.optim.Optimizer):
    """Orthogonalises the matrix: rows are mixed."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                gradient = parameter.grad if parameter.dim() > 1 else parameter.grad[None]
                u, _, v = torch.linalg.svd(gradient, full_matrices=False)
                parameter.sub_((u @ v).view_as(parameter), alpha=group["lr"])


class Lambish(torch.optim.Optimizer):
    """Scales the step by the norm of the tensor. `floor` is an attribute of its own, as optimizers may have."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.floor = 1e-3

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                trust = parameter.norm() / (parameter.grad.norm() + self.floor)
                parameter.sub_(parameter.grad * trust, alpha=group["lr"])


class Globalish(Lambish):
    """Scales by the norm over all tensors: any two pieces in one optimizer look as the whole does."""

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in held]).norm() + self.floor
        for parameter in held:
            parameter.sub_(parameter.grad / total, alpha=self.param_groups[0]["lr"])


class Hoarding(Lambish):
    """Keeps a list of parameters of its own, so it cannot be tried on another matrix."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters)
        self.own = parameters

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.own:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


def owned_plan(model, workers, **fields):
    return plan_of(model, workers, OWNED, **fields)


def with_group(plan, number, **fields):
    groups = list(plan.groups)
    groups[number] = replace(groups[number], **fields)
    return replace(plan, groups=tuple(groups))


# name: (job of (rank, workers) -> (plan, model, optimizer, more arguments), the message)
def other_world(rank, workers):
    model = Small()
    return owned_plan(model, 8), model, sgd(model.parameters()), {}


def other_nodes(rank, workers):
    model = Small()
    return owned_plan(model, 6, workers_per_node=3), model, sgd(model.parameters()), {}


def other_schedule(rank, workers):
    model = Small()
    return owned_plan(model, workers, schedule=Choice("ring")), model, sgd(model.parameters()), {}


def other_names(rank, workers):
    model = Small()
    return owned_plan(model, workers), model.lin, sgd(model.lin.parameters()), {}


def other_shapes(rank, workers):
    model = Small(width=6)
    return owned_plan(Small(), workers), model, sgd(model.parameters()), {}


def one_rank_other_model(rank, workers):
    model = Small(width=6 if rank == 1 else D)
    return owned_plan(Small(), workers), model, sgd(model.parameters()), {}


def each_rank_its_own_model(rank, workers):
    model = Small(width=D + rank)
    return owned_plan(model, workers), model, sgd(model.parameters()), {}


def other_buffers(rank, workers):
    model = Small()
    model.register_buffer("seen", torch.zeros(2 + rank))
    return owned_plan(model, workers), model, sgd(model.parameters()), {}


def other_strides(rank, workers):
    model = Small()
    if rank:
        model.lin.weight = nn.Parameter(model.lin.weight.detach().t().contiguous().t())
    return owned_plan(model, workers), model, sgd(model.parameters()), {}


def other_plans(rank, workers):
    model = Small()
    return owned_plan(model, workers, notes=(f"mine, {rank}",)), model, sgd(model.parameters()), {}


def other_groups(rank, workers):
    model = Small()
    plan = owned_plan(model, workers, workers_per_node=2 if rank else 1)
    return plan, model, sgd(model.parameters()), {}


def other_checks(rank, workers):
    model = Small()
    return owned_plan(model, workers), model, sgd(model.parameters()), {"check_order": rank == 0}


def optimizer_of(make):
    def job(rank, workers):
        model = Small()
        return owned_plan(model, workers), model, make(model.parameters()), {}

    return job


def lazy_lamb(rank, workers):
    model = Small()
    plan = plan_of(model, workers, {"emb.weight": "gather_rows"}, departures=("lazy",))
    return plan, model, Lambish(model.parameters()), {}


def not_held(rank, workers):
    model = Small()
    return owned_plan(model, workers), model, sgd(model.lin.parameters()), {}


def wrong_placement(rank, workers):
    model = Small()
    return with_group(owned_plan(model, workers), 1, layout="replicated"), model, sgd(model.parameters()), {}


def two_tables(rank, workers):
    model = Small()
    both = Group("both", ("emb.weight", "lin.weight"), "replicated", Choice("gather_rows"))
    rest = Group("rest", ("lin.bias",), "replicated", Choice("all_reduce"))
    plan = replace(owned_plan(model, workers), groups=(both, rest))
    return plan, model, sgd(model.parameters()), {}


def two_dtypes(rank, workers):
    model = Small()
    model.lin.bias.data = model.lin.bias.data.double()
    return replace(owned_plan(model, workers), model_fingerprint=fingerprint(model)), model, sgd(model.parameters()), {}


def no_such_exchange(rank, workers):
    model = Small()
    return with_group(owned_plan(model, workers), 0, exchange=Choice("allreduce")), model, sgd(model.parameters()), {}


REFUSALS = {
    other_world: r"rank 0: the plan is for 8 workers, this job has 2; plan again, or launch with --nproc-per-node 8",
    other_nodes: r"attach: the plan is for 6 workers, this job has 2; plan again, or launch with --nproc-per-node 6",
    other_schedule: r"schedule ring keeps tables whole, so emb.weight cannot go by row",
    other_names: r"it has \['emb.weight', 'lin.bias', 'lin.weight'\] which this one does not train and misses",
    other_shapes: r"this is \w{16}: the same names with other shapes or dtypes; plan again",
    one_rank_other_model: r"ranks built different models: .* is emb.weight \(11, 6\) float32 on rank 1 and emb",
    each_rank_its_own_model: r"ranks built different models: .* is emb.weight .* on rank 1 and emb.weight .* on rank 0",
    other_buffers: r"rank 1 holds 'seen' as \(3,\) float32, rank 0 as \(2,\) float32; build the same model on every",
    other_strides: r"rank 1 holds 'lin.weight' as \(2, 4\) float32 with strides \(1, 2\), rank 0 as \(2, 4\) float32;",
    other_plans: r"ranks hold different plans",
    other_groups: r"ranks want different groups.*\[\(1, False\), \(2, False\)\]; give every rank the same plan",
    other_checks: r"ranks want different groups.*\[\(1, True\), \(1, False\)\]",
    optimizer_of(Muonish): r"'emb.weight' is updated by row but Muonish steps a matrix.*'replicated'\}",
    optimizer_of(Lambish): r"'emb.weight' is updated by row but Lambish",
    optimizer_of(Globalish): r"'emb.weight' is updated by row but Globalish",
    optimizer_of(Hoarding): r"'emb.weight' is updated by row but Hoarding keeps parameters.* in own",
    optimizer_of(lambda ps: torch.optim.SparseAdam(list(ps))): r"SparseAdam cannot step a matrix with a plain dense",
    lazy_lamb: r"'emb.weight' is updated by row but Lambish",
    not_held: r"'emb.weight' is exchanged by row but the optimizer does not hold it; freeze it, or add it",
    wrong_placement: r"group 'emb.weight' is replicated, but owned_rows is for row_sharded tables",
    two_tables: r"group 'both': gather_rows takes one table, got \('emb.weight', 'lin.weight'\)",
    two_dtypes: r"group 'dense' holds float32 on cpu and float64 on cpu, which do not fit in one bucket",
    no_such_exchange: r"no dense exchange 'allreduce'; there are all_reduce",
}  # fmt: skip


def refuse(rank, workers, number):
    plan, model, optimizer, more = list(REFUSALS)[number](rank, workers)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the message is checked outside)
        attaching.attach(plan, model, optimizer, **more)
    after = dict(model.named_parameters())
    return str(caught.value), all(after[name] is parameter for name, parameter in before.items())


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=[f"{n} {job.__name__}" for n, job in enumerate(REFUSALS)])
def test_attach_refuses_on_every_rank_and_changes_nothing(crew, number):
    for error, is_untouched in crew(2).run(refuse, number):
        assert pytest.RaisesExc(ValueError, match=list(REFUSALS.values())[number]).matches(ValueError(error)), error
        assert is_untouched


def begin_apart(rank, workers):
    torch.manual_seed(rank)
    model = Small()
    model.register_buffer("seen", torch.tensor([float(rank)]))
    run = attaching.attach(owned_plan(model, workers), model, sgd(model.parameters()))
    torch.manual_seed(0)
    far = differences(run, model, Small())
    run._engine.finish()
    return far, float(model.seen)


def test_every_rank_begins_with_the_weights_of_rank_0(crew):
    assert crew(2).run(begin_apart) == [({"emb.weight": 0, "lin.weight": 0, "lin.bias": 0}, 0.0)] * 2


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3)


OPTIMIZERS = {
    "adam, warm-up from zero": (adam, warm_up),
    "fused adam, warm-up from zero": (lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True), warm_up),
    "sgd, warm-up from zero": (sgd, warm_up),
    "by norm of the tensor": (Lambish, None),  # not by row: refused when rows are sharded, exact when replicated
}


def train(rank, workers, name, exchange):
    make, scheduler_of = OPTIMIZERS[name]
    schedulers = []

    def optimizer_of(parameters):
        optimizer = make(parameters)
        if scheduler_of:
            schedulers.append(scheduler_of(optimizer))  # before attach, as scripts do
        return optimizer

    run, model, optimizer, reference, truth = pair(Small, workers, {"emb.weight": exchange}, optimizer_of)
    for step in range(5):
        optimizer.zero_grad()
        model(ids_of(rank, step)).backward()
        optimizer.step()
        train_step(reference, truth, [ids_of(worker, step) for worker in range(workers)], loss)
        for scheduler in schedulers:
            scheduler.step()
    return close(run, model, reference)


CARRIED = [(name, "owned_rows") for name in OPTIMIZERS if name != "by norm of the tensor"]
CARRIED += [(name, "gather_rows") for name in OPTIMIZERS]


@pytest.mark.parametrize(("name", "exchange"), CARRIED)
def test_what_an_optimizer_does_to_rows_is_found_out_rightly(crew, name, exchange):
    assert crew(2).run(train, name, exchange) == [{}, {}]


def end_early(rank, workers, tables):
    """Rank 1 has one batch fewer and nobody iterates over run.batches."""
    torch.manual_seed(0)
    model = Small()
    optimizer = sgd(model.parameters())
    run = attaching.attach(plan_of(model, workers, tables), model, optimizer, report_after=None, timeout=2.0)
    try:
        for step in range(2 - rank):
            optimizer.zero_grad()
            model(ids_of(rank, step)).backward()
            optimizer.step()
        run._engine.finish()
    except RuntimeError as error:
        return str(error)
    return ""


def test_uneven_batches_with_a_table_are_an_error_on_every_rank(crew):
    for error in crew(2).run(end_early, OWNED):
        assert "ranks [1] have finished while the others run a backward" in error
        assert "run.batches(loader)" in error


def test_uneven_batches_without_a_table_are_an_error_when_the_time_is_out(crew):
    errors = crew(2).run(end_early, {})
    assert "rank 0: backward, all-reduce of dense, step 1" in errors[0] and "run.batches" in errors[0]
    assert errors[1], "rank 1 must not believe that all is well"
