"""Laws of driving a delayed all-reduce: the reference's weights whatever the model; looks, checkpoints, bytes."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from armillary.checkpoint.saved_state import REST
from armillary.cli.names import find, small
from armillary.planning.planner import plan
from armillary.planning.request import PlanRequest
from armillary.plans import Choice, Link, Topology
from armillary.profiler.profiler import profile
from armillary.reference.versions import Reference, WorkersReference
from armillary.schedules.delayed_all_reduce import delayed_all_reduce
from armillary.schedules.simultaneous import simultaneous
from armillary.session import truth as schedule_truth
from armillary.session import verifiers
from armillary.session.attach import attach
from armillary.session.plan_job import JobRequest
from armillary.session.report import held_by_group
from armillary.session.verify import verify_workload
from owned import loss, optimizer_of, started
from staged_models import same

WIDTH, ROWS = 4, 3
LATE = Choice("delayed_all_reduce")
CLIPPED = Choice("delayed_all_reduce", {"clip_norm": 0.05})


def model_of(dropout=0.0):
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)]
    return nn.Sequential(*blocks).double()


def with_penalty(model, batch):
    """Reads the weights besides the output, as no stage could."""
    return loss(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters())


def batch_of(step, micro_batch):
    draw = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + micro_batch))
    return draw.double().unbind()


def plan_of(choice, processes):
    link = Link(1e-4, 1e8)
    facts = profile(model_of(), [batch_of(0, 0)] * processes, loss, workers=processes)
    return plan(facts, Topology(1, processes, link, link, 1 << 33), schedule=choice)


def driven(made, path=None, dropout=0.0):
    model = model_of(dropout)
    optimizer = optimizer_of(model)
    run = started(made, model, optimizer, loss, batch_of(0, 0))
    return run, run.load(path)["step"] if path else 0


def trained(run, steps):
    losses = []
    for step in steps:
        losses += run.step([batch_of(step, micro_batch) for micro_batch in run._engine.micro_batches])
    return losses


def truth(workers, steps, drains=(), dropout=0.0):
    model = model_of(dropout)
    optimizer = optimizer_of(model)
    reference = Reference([model], optimizer, delayed_all_reduce(workers), functional.mse_loss)
    for step in range(steps):
        if step in drains:
            reference.drain()
        reference.step([batch_of(step, micro_batch) for micro_batch in range(workers)])
    return dict(model.state_dict()), optimizer.state_dict()


def alike(these, those):
    """Bit for bit, whatever nests the tensors."""
    if isinstance(these, torch.Tensor):
        return torch.equal(these, those)
    if isinstance(these, dict):
        return these.keys() == those.keys() and all(alike(these[key], those[key]) for key in these)
    if isinstance(these, list | tuple):
        return len(these) == len(those) and all(map(alike, these, those))
    return these == those


# Equality with the reference


def verify_job(rank, world, cases):
    torch.set_num_threads(1)
    found = []
    for name, options, choice in cases:
        task = find(name, {**small(name), **options})
        found.append(verify_workload(task, request=JobRequest(PlanRequest(schedule=choice)), steps=4, every_bit=True))
    return found


VIT = ("vision", {"architecture": "vit", "width": 16, "depth": 2})
BATCH_NORM = ("vision", {"norm": "batch"})
UNCUT = ("language_model", {})  # no tracer cuts it into stages; its weights are drawn from, looked up and tied


def test_two_workers_train_as_the_reference_does_bit_for_bit(crew):
    answers = crew(2).run(verify_job, [(*VIT, LATE), (*BATCH_NORM, CLIPPED), (*UNCUT, LATE)])
    for found in answers[0]:
        assert found.is_equal and found.tolerance == 0.0, str(found)
        assert found.workers == 2 and len(found.differences) > 5
    assert all(answer == answers[0] for answer in answers)


def test_four_workers_are_equal_to_rounding_and_what_only_rounding_moves_is_not_judged(crew):
    (found,) = crew(4).run(verify_job, [(*VIT, LATE)])[0]
    assert found.is_equal and found.tolerance == 1e-10, str(found)
    verdicts = [one.verdict for one in found.differences]
    assert verdicts.count("equal") > 20 > verdicts.count("no gradient")


def verify_against_another_rule(rank, world, rule):
    """The reference is told another rule than the run."""
    kept = verifiers._truth_of_schedule, schedule_truth.WorkersReference
    if rule == "fresh":
        schedule_truth.WorkersReference = FreshReference
    else:
        verifiers._truth_of_schedule = lambda case, is_whole: kept[0](
            dataclasses.replace(case, plan=dataclasses.replace(case.plan, schedule=LATE)), is_whole
        )
    try:
        return verify_job(rank, world, [(*VIT, CLIPPED)])[0]
    finally:
        verifiers._truth_of_schedule, schedule_truth.WorkersReference = kept


class FreshReference(WorkersReference):
    def __init__(self, stages, optimizer, schedule, *rest):
        super().__init__(stages, optimizer, simultaneous(schedule.workers), *rest)


@pytest.mark.parametrize("rule", ["fresh", "unclipped"])
def test_another_rule_is_not_called_equal(crew, rule):
    for found in crew(2).run(verify_against_another_rule, rule):
        assert not found.is_equal and "NOT equal" in str(found)


# Looking, and saving


def look(rank, world, made):
    run, _ = driven(made, dropout=0.3)
    seen, losses = [], []
    for step in range(4):
        losses += trained(run, [step])
        with run._engine.newest():
            seen.append({name: value.clone() for name, value in run._engine.model.state_dict().items()})
    return seen, [one.step for one in losses], run.export()


def test_a_look_shows_the_newest_weights_everywhere_and_changes_nothing(crew):
    answers = crew(2).run(look, plan_of(LATE, 2))
    for seen, steps, _ in answers:
        assert steps == list(range(4))
        for step, weights in enumerate(seen):
            assert alike(weights, truth(2, step + 1, dropout=0.3)[0]), step
    model, optimizer = truth(2, 4, dropout=0.3)
    assert alike(answers[0][2], {"model": model, "optimizer": optimizer}) and answers[1][2] is None


def save_on_the_way(rank, world, made, folder):
    run, _ = driven(made)
    trained(run, range(3))
    path = run.save(folder, loop={"step": 3, "feed": {}}, keep=1)
    trained(run, range(3, 6))
    return str(path), run.export()


def resume(rank, world, made, path):
    run, first = driven(made, path)
    trained(run, range(first, 6))
    return run.export()


SAME_RULE = [
    (1, Choice("one_device", {"micro_batches": 2, "slack": 2})),
    (2, Choice("ring", {"slack": 2})),
    (2, Choice("pipeline", {"slack": 2})),
    (2, LATE),
]


def test_a_checkpoint_goes_on_in_every_mode_as_the_run_that_wrote_it_and_opens_in_plain_torch(crew, tmp_path):
    """All one step late and without dropout, the modes follow one rule; one writes, each goes on."""
    path, uninterrupted = crew(2).run(save_on_the_way, plan_of(LATE, 2), str(tmp_path))[0]
    model, optimizer = truth(2, 6, drains=(3,))
    assert alike(uninterrupted, {"model": model, "optimizer": optimizer})
    for processes, choice in SAME_RULE:
        assert alike(crew(processes).run(resume, plan_of(choice, processes), path)[0], uninterrupted), choice
    saved = torch.load(Path(path) / REST, weights_only=True)
    assert alike(dict(saved["model"]), truth(2, 3)[0])


# What is forecast


def count(rank, world, made):
    run, _ = driven(made)
    trained(run, range(4))
    run._engine.drain()
    held, waited = sum(held_by_group(run._engine).values()), sum(run._engine.parts.channel.waited.values())
    return sum(sent for sent, _ in run._engine.parts.channel.take().values()) / 4, held, waited > 0


@pytest.mark.parametrize("bucket_bytes", [0, 100])
def test_the_bytes_forecast_are_the_bytes_sent_and_held(crew, bucket_bytes):
    made = plan_of(Choice("delayed_all_reduce", {"bucket_bytes": bucket_bytes}), 2)
    assert len(made.groups) == (1 if bucket_bytes == 0 else 4)
    for sent, held, has_waited in crew(2).run(count, made):
        assert sent == sum(group.forecast.sent_bytes for group in made.groups) and has_waited
        planned = sum(group.forecast.memory_bytes for group in made.groups)
        flags, step_counts = 8 * 8, 8 * 4  # one per parameter; flags are behind gradients only, Adam counts its steps
        assert held == planned - 3 * flags + step_counts


# What is refused, and what is not


def beside(model):
    """A loss that reads the weights in a way of its own."""
    kept = list(model.parameters())
    return lambda model, batch: loss(model, batch) + sum(p.square().sum() for p in kept)


def misuse(rank, world, made):
    said, model = [], model_of()
    owned = dataclasses.replace(made.groups[0], exchange=Choice("owned_dense", {"owner": 0}))
    for attempt in (
        lambda: attach(made, model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss),
        lambda: started(made, model, optimizer_of(model), beside(model), batch_of(0, 0)),
        lambda: driven(made.with_group(owned)),
        lambda: driven(dataclasses.replace(made, schedule=Choice("delayed_all_reduce", {"slack": 1}))),
        lambda: driven(dataclasses.replace(made, schedule=Choice("delayed_all_reduce", {"clip_norm": -1.0}))),
        lambda: driven(made)[0].step([batch_of(0, 0)] * 2),
    ):
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))
    return said


def test_misuse_is_answered_with_what_to_do(crew):
    for said in crew(2).run(misuse, plan_of(LATE, 2)):
        owns, reads, exchange, strange, negative, batches = said
        assert "needs example" in owns and "the loss reads 0.0.weight, 0.0.bias, 1.0.weight beside the model" in reads
        assert "knows all_reduce only" in exchange
        assert "delayed_all_reduce has no slack; it may have bucket_bytes, clip_norm" in strange
        assert "clip wants a positive norm" in negative
        assert "hands in 1 micro-batches" in batches and "got 2" in batches


def scaled(rank, world, made):
    model, scaler = model_of(), torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="scaled by a GradScaler"):
        started(made, model, optimizer_of(model), lambda *given: scaler.scale(loss(*given)), batch_of(0, 0))


def test_a_loss_under_a_scaler_is_refused_since_its_scale_would_be_another_steps(crew):
    crew(1).run(scaled, plan_of(LATE, 1))


def penalised(rank, world, made):
    model = model_of()
    optimizer = optimizer_of(model)
    run = started(made, model, optimizer, with_penalty, batch_of(0, 0))
    trained(run, range(3))
    run._engine.drain()
    return [p.detach() for p in model.parameters()]


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model_of()

    def forward(self, batch):
        return with_penalty(self.model, batch)


def test_a_loss_that_no_stage_could_see_is_trained_too(crew):
    whole = Whole()
    reference = Reference([whole], optimizer_of(whole.model), delayed_all_reduce(2), lambda value, _: value)
    for step in range(3):
        reference.step([(batch_of(step, m), None) for m in range(2)])
    for got in crew(2).run(penalised, plan_of(LATE, 2)):
        assert same(got, [p.detach() for p in whole.parameters()])
