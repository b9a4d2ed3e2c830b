"""Laws of tables kept by row under a cyclic schedule: what plain loops over whole tables give, bit for bit."""

import pytest
import torch

from armillary.session.cyclic.drive import drive
from table_models import BY_ROW, OPTIMIZERS, batch_of, loss, model_of, plan_of, points_of, truth

STEPS = 5


def run_of(made, optimizer="sgd", dtype=torch.float64):
    model = model_of(dtype)
    return drive(made, model, OPTIMIZERS[optimizer](model.parameters()), loss, batch_of(0, 0, dtype), seed=5)


def trained(run, steps, drains=(), looks=()):
    """Losses by step; the rate falls after two steps."""
    scheduler, dtype = torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [2], 0.1), next(run.model.parameters()).dtype
    losses = []
    for step in range(steps):
        if step in drains:
            run.drain()
        if step in looks:
            with run.newest(), torch.no_grad():
                for number in range(run.rank):  # not equally often on every rank
                    run.model(batch_of(step, number, dtype)[0])
        losses += run.step([batch_of(step, number, dtype) for number in run.micro_batches])
        scheduler.step()
    run.drain()
    losses += run.losses()
    return [list(one.losses) for one in losses]


def held(run):
    """By name: (ids owned here, rows, optimizer state of the rows) of tables, and whole weights of the others."""
    tables = {}
    for name, table in run.tables.by_name.items():
        state = run.tables.held[name] if table.has_window else dict(run.optimizer.state[table.parameter])
        rows = {key: v.clone() for key, v in state.items() if torch.is_tensor(v) and v.shape == table.shard.shape}
        tables[name] = table.ownership.ids(run.rank), table.shard.clone(), rows
    with run.newest():
        whole = {name: p.detach().clone() for name, p in run.model.named_parameters() if name not in tables}
    return tables, whole


def job(rank, world, cases):
    torch.set_num_threads(1)
    found = []
    for made, optimizer, dtype, drains, looks in cases:
        run = run_of(made, optimizer, dtype)
        losses = trained(run, STEPS, drains, looks)
        found.append((*held(run), losses))
        run.transport.close()
    return found


def is_exact(options, processes):
    """gloo adds the whole gradients of three ranks in an order of its own."""
    return options["mode"] == "pipeline" or processes < 3


def same(mine, true, exact=True):
    if exact:
        return torch.equal(mine, true)
    return torch.allclose(mine, true, rtol=0, atol=1e-10)


def refute(answers, case, options, processes):
    """The first thing that is not the truth's; empty if there is none."""
    _, optimizer, dtype, drains, _ = case
    lazy = BY_ROW if any(group.is_lazy for group in case[0].groups) else ()
    model, made, true_losses = truth(options, processes, STEPS, optimizer, lazy, drains, dtype)
    named, exact = dict(model.named_parameters()), is_exact(options, processes)
    for rank, (tables, whole, losses) in enumerate(answers):
        for name, (ids, rows, state) in tables.items():
            if not same(rows, named[name][ids], exact):
                return f"rank {rank}: rows of {name}"
            wanted = {k: v for k, v in made.state[named[name]].items() if getattr(v, "shape", ()) == named[name].shape}
            if state.keys() != wanted.keys() or not all(same(state[k], wanted[k][ids], exact) for k in wanted):
                return f"rank {rank}: optimizer state of {name}"
        if different := [name for name in whole if not same(whole[name], named[name], exact)]:
            return f"rank {rank}: {different}"
        worker = rank if options["mode"] == "one_device" else 0
        knows = options["mode"] == "one_device" or rank == processes - 1
        wanted = [step[worker] for step in true_losses] if knows else []
        if len(losses) != len(wanted) or not all(
            same(a, b, exact) for these, those in zip(losses, wanted, strict=True) for a, b in zip(these, those)
        ):
            return f"rank {rank}: losses"
    return ""


def one_device(stages=3, micro_batches=3, **options):
    return {"mode": "one_device", "micro_batches": micro_batches, "points": points_of(stages), "stages": stages,
            **options}  # fmt: skip


def pipeline(stages, **options):
    return {"mode": "pipeline", "points": points_of(stages), **options}


def checked(crew, processes, listed):
    """listed: (options, what differs from the usual case)."""
    cases = []
    for options, said in listed:
        dtype = said.get("dtype", torch.float64) if is_exact(options, processes) else torch.float64
        made = plan_of(options, processes, lazy=said.get("lazy", ()), dtype=dtype)
        cases.append((made, said.get("optimizer", "sgd"), dtype, said.get("drains", ()), said.get("looks", ())))
    answers = crew(processes).run(job, cases)
    for number, ((options, _), case) in enumerate(zip(listed, cases, strict=True)):
        assert not (found := refute([answer[number] for answer in answers], case, options, processes)), (found, options)


VARIETY = [
    {"optimizer": "sgd"},
    {"optimizer": "momentum", "drains": (3,)},
    {"optimizer": "adagrad", "dtype": torch.float32, "looks": (1, 3)},
    {"optimizer": "fused adagrad", "drains": (1, 4), "looks": (2,)},
    {"optimizer": "adam"},
    {"optimizer": "adam", "lazy": tuple(BY_ROW)},
]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_one_device_on_one_rank_and_on_several_is_the_reference(crew, processes):
    shapes = [one_device(), one_device(2, 2, slack=1), one_device(1, 4), one_device(3, 3, slack=3),
              one_device(3, 2), one_device(3, 3, recompute=[0, 2])]  # fmt: skip
    checked(crew, processes, list(zip(shapes, VARIETY, strict=True)))


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_pipeline_whose_tables_all_stages_own_is_the_reference(crew, processes):
    shapes = [pipeline(processes), pipeline(processes, slack=1), pipeline(processes, micro_batches=4),
              pipeline(processes, slack=4), pipeline(processes, micro_batches=5, slack=2),
              pipeline(processes, recompute=[0])]  # fmt: skip
    checked(crew, processes, list(zip(shapes, VARIETY, strict=True)))
