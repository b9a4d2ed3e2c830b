"""An exact plan trains as one process does: exchanges x optimizers x worker counts x what real loops do.

Coverage is pairwise, as stated in `CASES`: every exchange meets every optimizer, every deed (what the loop does) and
every worker count; an optimizer meets other deeds with each exchange. Not every triple is run.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from armillary.plans import Choice
from armillary.reference.serial import keep_untouched_rows, train_step
from armillary.session.attach import attach
from scenes import OPTIMIZERS, Mixed, batch_of, loss, plan_for

EXCHANGES = {
    "all_reduce": (Choice("all_reduce"), Choice("all_reduce"), 1),
    "owned_dense": (Choice("owned_dense", {"owner": 1}), Choice("owned_dense"), 1),
    "gather_rows": (Choice("gather_rows"), Choice("all_reduce"), 1),
    "owned_rows": (Choice("owned_rows"), Choice("all_reduce"), 1),
    "owned_rows_hashed": (Choice("owned_rows", {"order": "hashed"}), Choice("owned_dense"), 1),
    "owned_rows_one_owner": (Choice("owned_rows", {"owners": 1}), Choice("all_reduce"), 1),
    "by_node": (
        Choice("owned_rows_by_node"),
        Choice("owned_dense", {"owner": 1, "local_aggregation": True}),
        2,
    ),
}
DEEDS = [
    "plain", "clip_norm", "clip_inf_norm", "clip_value", "accumulate", "scheduler", "bag_unread_by_some",
    "padding_only", "uneven_sizes", "uneven_counts", "weights", "keep_grads", "evaluate_between", "lazy",
]  # fmt: skip
STEPS = 3


def clip(deed):
    return {
        "clip_norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
        "clip_inf_norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.02, norm_type=float("inf")),
        "clip_value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    }.get(deed)


def batches_of(deed, worker, workers, step):
    """What worker `worker` trains on at `step`: a list, longer than one when gradients accumulate; none if it ran
    out."""
    if deed == "uneven_counts" and step >= STEPS - worker % 2:
        return []
    size = 6 - (worker % 3 if deed in ("uneven_sizes", "weights") else 0)
    reads_bag = not (deed == "bag_unread_by_some" and (worker + step) % 2 == 0)
    only_padding = deed == "padding_only" and worker == 0
    pieces = 2 if deed == "accumulate" else 1
    return [batch_of(worker, step * pieces + piece, size, only_padding, reads_bag) for piece in range(pieces)]


def weight_of(deed, batch):
    return float(len(batch["ids"])) if deed == "weights" else 1.0


def reference_step(model, optimizer, deed, workers, step):
    work = [batches_of(deed, worker, workers, step) for worker in range(workers)]
    present = [pieces for pieces in work if pieces]

    def total(model, pieces):
        return sum(loss(model, piece) for piece in pieces)

    weights = [weight_of(deed, pieces[0]) for pieces in present]
    absent = workers - len(present)

    def settle(model):
        for parameter in model.parameters():
            if parameter.grad is not None and absent:  # the divisor stays the number of workers
                parameter.grad.mul_(len(present) / workers)
        if clip(deed):
            clip(deed)(model)

    def step_now():
        train_step(model, optimizer, present, total, weights, settle)

    if deed == "lazy":
        names = [name for name, _ in model.named_parameters() if name in ("soft", "bias") or ".weight" in name[-7:]]
        tables = [name for name in names if not name.startswith("lin")]
        keep_untouched_rows(model, optimizer, tables, step_now)
    else:
        step_now()


def run_step(run, model, optimizer, deed, pieces):
    if deed == "keep_grads":
        optimizer.zero_grad(set_to_none=False)
    else:
        model.zero_grad() if deed == "plain" else optimizer.zero_grad()
    if deed == "weights":
        run.weigh(weight_of(deed, pieces[0]))
    for piece in pieces[:-1]:
        with run.no_sync():
            loss(model, piece).backward()
    loss(model, pieces[-1]).backward()
    if clip(deed):
        clip(deed)(model)
    optimizer.step()


def differences(run, model, reference):
    """Norm of the difference per tensor, relative to the tensor."""
    far = {}
    for name, want in reference.named_parameters():
        if name in run._engine.tables:
            table = run._engine.tables[name]
            rank, owned = run.rank, table.ownership
            mine = want if not table.is_pulled else want[owned.ids(rank)] if rank in owned.owners else want[:0]
            got = table.shard
        else:
            got, mine = model.get_parameter(name), want
        far[name] = float((got - mine).detach().norm() / (1e-30 + want.detach().norm()))
    return far


def train_both(rank, workers, exchange, optimizer_name, deed):
    rows, dense, per_node = EXCHANGES[exchange]
    torch.manual_seed(7)
    reference = Mixed().double()
    model = copy.deepcopy(reference)
    optimizer, truth = (
        OPTIMIZERS[optimizer_name](model.parameters()),
        OPTIMIZERS[optimizer_name](reference.parameters()),
    )
    fields = {"mean": "weights"} if deed == "weights" else {}
    if deed == "lazy":
        fields["departures"] = ("lazy",)
    plan = plan_for(model, workers, rows, dense, workers_per_node=per_node, **fields)
    run = attach(plan, model, optimizer, check_order=deed in ("bag_unread_by_some", "evaluate_between"))
    schedulers = (
        [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (optimizer, truth)] if deed == "scheduler" else []
    )
    for step in range(STEPS):
        reference_step(reference, truth, deed, workers, step)
        for scheduler in schedulers[1:]:
            scheduler.step()
    mine = [pieces for step in range(STEPS) if (pieces := batches_of(deed, rank, workers, step))]
    for step, pieces in enumerate(run.batches(mine) if deed == "uneven_counts" else mine):
        if deed == "evaluate_between" and (step + rank) % 2:
            with torch.no_grad():  # on some ranks only, and not equally often
                for extra in range(rank + 1):
                    loss(model, batch_of(90 + extra, step))
        run_step(run, model, optimizer, deed, pieces)
        for scheduler in schedulers[:1]:
            scheduler.step()
    never = model.never.grad
    far = differences(run, model, reference)
    run.close()
    return far, never is None


def fits(exchange, workers):
    return workers % EXCHANGES[exchange][2] == 0


def cases():
    """Each exchange does all deeds, with optimizers and worker counts dealt round robin, each exchange from another
    place on; and one worker trains with it alone."""
    for place, exchange in enumerate(EXCHANGES):
        several = [workers for workers in (2, 3, 4) if fits(exchange, workers)]
        counts = itertools.islice(itertools.cycle(several), place, None)
        names = [name for name in OPTIMIZERS if name != "sgd"]
        optimizers = itertools.cycle(names[place:] + names[:place])
        for deed in DEEDS:
            if deed == "lazy" and exchange in ("all_reduce", "owned_dense"):
                continue
            # gradients kept as zeros step an unused parameter by zero in any job, which Adam would notice
            yield exchange, "sgd" if deed == "keep_grads" else next(optimizers), deed, next(counts)
        if fits(exchange, 1):
            yield exchange, next(optimizers), "plain", 1


CASES = list(cases())


def test_every_exchange_meets_every_optimizer_deed_and_worker_count():
    for exchange, (_, _, per_node) in EXCHANGES.items():
        of_it = [case[1:] for case in CASES if case[0] == exchange]
        optimizers, deeds, workers = map(set, zip(*of_it, strict=True))
        assert optimizers == set(OPTIMIZERS)
        assert deeds >= {*DEEDS} - ({"lazy"} if exchange in ("all_reduce", "owned_dense") else set())
        assert workers == {count for count in (1, 2, 3, 4) if count % per_node == 0}


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exact_plan_trains_like_one_process(crew, exchange):
    wrong = []
    for _, optimizer, deed, workers in (case for case in CASES if case[0] == exchange):
        for rank, (far, never_is_none) in enumerate(crew(workers).run(train_both, exchange, optimizer, deed)):
            worst = max(far, key=far.get)
            if far[worst] > 1e-10 or not never_is_none:
                wrong.append((workers, optimizer, deed, rank, worst, far[worst], never_is_none))
    assert not wrong, wrong[:12]
