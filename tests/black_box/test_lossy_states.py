"""What coded exchanges keep: on other numbers of workers, and through a step that is left out."""

import torch
from small_models import OPTIMIZERS, made

import face
from armillary import Choice
from armillary.exchanges import build_dense
from armillary.reference.replicas import Replicas, SharedGroup

WIDE = "threshold(sparsity=0.9, small=0)"


def wide():
    torch.manual_seed(4)
    return torch.nn.Linear(40, 40, bias=False).double()


def wide_batch(rank, step):
    return torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def wide_loss(model, batch):
    """Its gradients are alike in every step."""
    return (model(batch[0]) * batch[1]).mean()


def sent_shares(rank, workers, plan, folder, steps):
    """The share of numbers that each step sent, from the latest checkpoint on; a save at the end."""
    model, shares = wide(), []
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), wide_loss)
    if path := face.latest_checkpoint(folder):
        face.load(run, path)
    for step in steps:
        face.step(run, [wide_batch(rank, step)])
        (unit,) = run.run._engine.executor.units
        shares.append(unit.exchange.density(unit.bucket.layout, unit.state))
    face.save(run, folder)
    face.close(run)
    return shares


def test_thresholds_let_as_much_pass_when_they_are_opened_among_more_workers(crew, tmp_path):
    """Seven pushes were made: by its age no threshold would be taken anew in the eighth."""
    for workers, steps in ((2, range(7)), (4, range(7, 9))):
        batches = [wide_batch(rank, 0) for rank in range(workers)]
        plan = face.plan_for(wide(), wide_loss, batches, workers, exchange={"*": Choice.parse(WIDE)})
        for shares in crew(workers).run(sent_shares, plan, tmp_path, steps):
            assert min(shares) > 0.05, (workers, shares)


class Apart(torch.nn.Module):
    """Two layers, of which one overflows where it is told to."""

    def __init__(self):
        super().__init__()
        self.sound, self.sick = (torch.nn.Linear(40, 40, bias=False) for _ in range(2))

    def forward(self, inputs, factor):
        return self.sound(inputs) + self.sick(inputs) * factor


def apart_loss(model, given):
    batch, factor = given
    return (model(batch[0], factor) * batch[1]).mean()


def skipping(model):
    if not all(bool(p.grad.isfinite().all()) for p in model.parameters()):
        model.zero_grad(set_to_none=True)


def left_out(rank, workers, plan, steps):
    """Weights and states after these steps. In step 2 one layer's gradient is not finite on rank 1."""
    model = made(Apart)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    run = face.start(plan, model, optimizer, apart_loss)
    for step in steps:
        optimizer.zero_grad()
        apart_loss(model, apart_batch(rank, step)).backward()
        skipping(model)
        optimizer.step()
    kept = [{entry: value.clone() for entry, value in unit.state.items()} for unit in run.run._engine.executor.units]
    found = face.weights(run), kept
    face.close(run)
    return found


def apart_batch(rank, step):
    return wide_batch(rank, step), float("inf") if (rank, step) == (1, 2) else 1.0


def test_a_step_that_is_left_out_for_one_group_moves_the_state_of_none(crew):
    ways = {"sound.weight": "quantize(bits=2)", "sick.weight": "quantize(bits=4)"}
    wished = {name: Choice.parse(text) for name, text in ways.items()}
    plan = face.plan_for(made(Apart), apart_loss, [apart_batch(rank, 0) for rank in range(2)], 2, exchange=wished)
    groups = [
        SharedGroup(group.parameters, build_dense(group.exchange.name, **group.exchange.options))
        for group in plan.groups
    ]
    assert len(groups) == 2
    truth = Replicas(made(Apart), lambda model: OPTIMIZERS["sgd"](model.parameters()), 2, groups)
    for step in range(5):
        truth.step([apart_batch(rank, step) for rank in range(2)], apart_loss, None, skipping)
    answers = [crew(2).run(left_out, plan, steps) for steps in ([0, 1, 2, 3, 4], [0, 1, 3, 4])]
    for rank, ((weights, states), (others, unbroken)) in enumerate(zip(*answers, strict=True)):
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert all(torch.equal(weights[name], want) for name, want in truth.named[rank].items())
        for number, (mine, theirs) in enumerate(zip(states, unbroken, strict=True)):
            want = truth.states[number][rank]["residual"]
            assert torch.equal(mine["residual"], theirs["residual"]) and torch.equal(mine["residual"], want)
            assert float(want.abs().max()) > 0


def in_half(rank, workers, plan, folder):
    """What waits after three steps of 16-bit numbers; and once it was loaded."""
    found = []
    for is_again in (False, True):
        model = made(Apart, torch.bfloat16)
        run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), half_loss)
        if is_again:
            face.load(run, face.latest_checkpoint(folder))
        for step in () if is_again else range(3):
            face.step(run, [apart_batch(rank, step)])
        if not is_again:
            face.save(run, folder)
        units = run.run._engine.executor.units
        found.append([unit.state["residual"].clone() for unit in units])
        told = [unit.exchange.state_bytes(unit.bucket.layout, workers) for unit in units]
        assert told == [sum(entry.nbytes for entry in unit.state.values()) for unit in units]
        face.close(run)
    return found


def half_loss(model, given):
    batch, _ = given
    return (model(batch[0].bfloat16(), 1.0) * batch[1].bfloat16()).mean()


def test_what_waits_of_16_bit_numbers_is_kept_in_float32_also_in_a_checkpoint(crew, tmp_path):
    wished = {"*": Choice.parse("quantize(bits=2)")}
    batches = [apart_batch(rank, 0) for rank in range(2)]
    plan = face.plan_for(made(Apart, torch.bfloat16), half_loss, batches, 2, exchange=wished)
    assert sum(group.forecast.memory_bytes for group in plan.groups) >= 2 * 1600 * (3 * 2 + 4)
    for before, after in crew(2).run(in_half, plan, tmp_path):
        for mine, again in zip(before, after, strict=True):
            assert mine.dtype == again.dtype == torch.float32 and torch.equal(mine, again)
            assert not torch.equal(mine, mine.bfloat16().float())
