"""Weights that two stages of an exact pipeline share are trained as in one process; stale schedules refuse them."""

import re

import pytest
import torch
from plain_loop import differ, state_of, train
from torch import nn
from torch.nn import functional

import armillary
from armillary.stages.reducer import SharedGradients

COUNT, STEPS, WIDTH, WORDS, TIGHT = 3, 4, 6, 11, 0.3
POINTS = {2: ["blocks.1"], 3: ["blocks.1", "norm"]}  # by ranks, where later stages begin
MODULES = ["embed", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]


class Tiny(nn.Module):
    """A language model whose head is its table."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


class Dropped(Tiny):
    """It draws random numbers, so that its truth is a loop over stages."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.append(nn.Dropout(0.3))


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batch_of(step, number):
    return torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(100 * step + number))


def batches_of(step):
    return [batch_of(step, number) for number in range(COUNT)]


def model_of(seed=0, kind=Tiny):
    torch.manual_seed(seed)
    return kind().double()


OPTIMIZERS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1),
}


def clip(model):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), TIGHT)
    assert norm > TIGHT  # or clipping would show nothing


def truth(optimizer, is_clipped):
    model = model_of()
    stepped = OPTIMIZERS[optimizer](model)
    said = {"clip": clip} if is_clipped else {}
    losses = train(model, stepped, loss_of, [batches_of(step) for step in range(STEPS // 2)], **said)
    judged = loss_of(model, batch_of(0, 0)).item()
    losses += train(model, stepped, loss_of, [batches_of(step) for step in range(STEPS // 2, STEPS)], **said)
    return losses, state_of(model), stepped.state_dict()["state"], judged


def started(schedule, world, model, optimizer, **options):
    asked = armillary.Choice(schedule, {"micro_batches": COUNT, "points": POINTS[world], **options})
    return armillary.parallelize(
        model, OPTIMIZERS[optimizer](model), batches_of(0), loss_of, schedule=asked, stages=MODULES
    )


def trained(rank, world, cases, folder):
    """Per case: losses, weights and state as exported, of a run that is saved, loaded and goes on half-way."""
    found = []
    for number, (schedule, optimizer, is_clipped) in enumerate(cases):
        path, said = f"{folder}/{world}-{number}", {"clip_norm": TIGHT} if is_clipped else {}
        first, told = model_of(), []
        if rank == world - 1:
            first.embed.weight.data.add_(1.0)  # the owner's counts
        with started(schedule, world, first, optimizer, **said) as run:
            for step in range(STEPS // 2):
                told += run.step(batches_of(step))
            kept, report = run.save(path), str(run.report())
            judged = run.evaluate([batch_of(0, 0)], lambda model, batch: {"loss": loss_of(model, batch).item()})
            run.step(batches_of(99))
        second = model_of(seed=5)
        stepped = OPTIMIZERS[optimizer](second)
        with armillary.attach(run.plan, second, stepped, loss=loss_of, example=batch_of(0, 0)) as run:
            run.load(kept)
            for step in range(STEPS // 2, STEPS):
                told += run.step(batches_of(step))
            run.save(path)  # compares what ranks hold alike
            exported = run.export()
        losses = [[float(value) for value in one.losses] for one in told]
        found.append((losses, state_of(second), judged, exported, report))
    return found


CASES = {
    2: [("gpipe", "momentum", False), ("one_f_one_b", "adamw", True)],
    3: [("gpipe", "adamw", False), ("one_f_one_b", "momentum", True)],
}


@pytest.mark.parametrize("world", CASES)
def test_a_tied_model_trains_as_in_one_process(crew, world, tmp_path):
    answers = crew(world).run(trained, CASES[world], str(tmp_path))
    for number, (_, optimizer, is_clipped) in enumerate(CASES[world]):
        losses, weights, state, loss = truth(optimizer, is_clipped)
        for told, closed, judged, _, _ in (answer[number] for answer in answers):
            assert told == [pytest.approx(step, rel=1e-10) for step in losses]
            assert not differ(closed, weights)
            assert judged["loss"] == pytest.approx(loss, rel=1e-10)
        *_, exported, report = answers[0][number]
        assert not differ(exported["model"], weights)
        mine = exported["optimizer"]["state"]
        assert mine.keys() == state.keys()
        for parameter, entries in state.items():
            assert not differ(tensors(mine[parameter]), tensors(entries), 1e-9)
        for what in ("copy's gradient", "shared gradient"):
            ((forecast, sent),) = re.findall(rf"{what} of stage {world - 1} +([\d.]+) +([\d.]+)", report)
            assert float(forecast) == float(sent) > 0.0


def tensors(entries):
    return {key: torch.as_tensor(value).double() for key, value in entries.items() if value is not None}


def keeps_its_own(self, means, came):
    return means


FAULTS = {
    "none": "",
    "none, with dropout": "",
    "the owner leaves a copy out": "added",
    "a copy steps with its own": "replaced",
}


def verified(rank, world):
    """By planted fault, whether verify says equal; and what a save says of copies that came apart."""
    found = {}
    for fault, planted in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            if planted:
                patch.setattr(SharedGradients, planted, keeps_its_own)
            model = model_of(kind=Dropped if "dropout" in fault else Tiny)
            given = [batch_of(step, number) for step in range(3) for number in range(COUNT)]
            asked = armillary.Choice("gpipe", {"micro_batches": COUNT, "points": POINTS[world], "clip_norm": TIGHT})
            found[fault] = armillary.verify(model, OPTIMIZERS["adamw"](model), given, loss_of, steps=3, schedule=asked)
    return {fault: (one.is_equal, str(one)) for fault, one in found.items()}


def came_apart(rank, world, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedGradients, "replaced", keeps_its_own)
        run = started("gpipe", world, model_of(), "momentum")
        run.step(batches_of(0))
        with pytest.raises(RuntimeError) as caught:
            run.save(folder)
        run.close()
    return str(caught.value)


def test_verify_says_equal_and_a_sum_left_out_is_seen(crew, tmp_path):
    for found in crew(2).run(verified):
        assert {fault: is_equal for fault, (is_equal, _) in found.items()} == {
            fault: "none" in fault for fault in FAULTS
        }, found
    for said in crew(2).run(came_apart, str(tmp_path)):
        assert "embed.weight" in said


REFUSED = {
    "pipeline": ({}, "under pipeline its two uses would see weights of different age"),
    "gpipe": ({"clip_norm": TIGHT, "clip_by": "stage"}, "clip_by=stage would clip its two copies by different norms"),
}


def refusals(rank, world):
    found = {}
    for schedule, (options, _) in REFUSED.items():
        with pytest.raises(ValueError, match=r"embed.weight of stage 0 and head.weight of stage 1 are one") as caught:
            started(schedule, world, model_of(), "adamw", **options)
        found[schedule] = str(caught.value)
    return found


def test_what_would_not_keep_copies_alike_is_refused_with_its_reason(crew):
    for said in crew(2).run(refusals):
        for schedule, (_, why) in REFUSED.items():
            assert why in said[schedule]
        assert "take schedule gpipe or one_f_one_b, which sum their gradients" in said["pipeline"]
