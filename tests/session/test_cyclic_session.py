"""Laws of driving a cyclic plan: bit for bit the reference in every mode, looked at, drained, saved and resumed."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from armillary.checkpoint.saved_state import REST
from armillary.cli.names import find, small
from armillary.models.split_loss import SplitLoss
from armillary.planning.planner import plan
from armillary.planning.request import PlanRequest
from armillary.plans import Axis, Choice, Group, Link, Mesh, Plan, StagePlan, Topology, model_fingerprint
from armillary.profiler.profiler import profile
from armillary.reference.versions import Reference
from armillary.schedules import SCHEDULES, options_of, read
from armillary.schedules.random_streams import place_seed, seed_from_step
from armillary.session import verifiers as cyclic_verify
from armillary.session.attach import attach
from armillary.session.events import Ended, Evaluated, PlannedJob, Resumed, Saved
from armillary.session.plan_job import JobRequest
from armillary.session.train import train
from armillary.session.train_settings import Settings
from armillary.session.verify import verify_workload
from owned import loss, optimizer_of, same, started

WIDTH, ROWS = 4, 3
ONE, UP, ROUND = Choice("one_device", {"micro_batches": 2}), Choice("pipeline"), Choice("ring")
ZERO = Choice("zero_ring")
SHARED = Choice("shared_stages")


EVERY = [(1, ONE), (2, UP), (2, ROUND), (2, ZERO), (3, SHARED)]


def also(choice, **options):
    return Choice(choice.name, {**choice.options, **options})


def model_of():
    """Four blocks with dropout, so that every place must draw its own numbers, whatever the mode."""
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)]
    return nn.Sequential(*blocks).double()


def batch_of(step, micro_batch):
    draw = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + micro_batch))
    return draw.double().unbind()


def plan_of(options, processes):
    """`processes` on one node, as the user would ask for it."""
    link = Link(1e-4, 1e8)
    facts = profile(model_of(), [batch_of(0, 0)] * processes, loss, workers=processes)
    return plan(facts, Topology(1, processes, link, link, 1 << 33), schedule=options)


def driven(made, path=None):
    model = model_of()
    optimizer = optimizer_of(model)
    run = started(made, model, optimizer, loss, batch_of(0, 0), seed=5)
    return run, run.load(path)["step"] if path else 0


def trained(run, steps):
    losses = []
    for step in steps:
        losses += run.step([batch_of(step, micro_batch) for micro_batch in run._engine.micro_batches])
    return losses


def truth(options, processes, steps, drains=()):
    """(weights, optimizer state, losses of the micro-batches) of one process after `steps` steps."""
    model = model_of()
    optimizer, found = optimizer_of(model), read(options, processes)
    links = [nn.Sequential(*list(model)[first : first + 4 // found.stages]) for first in range(0, 4, 4 // found.stages)]
    reference = Reference(links, optimizer, found.schedule(), functional.mse_loss, seed=5)
    losses = []
    for step in range(steps):
        if step in drains:
            reference.drain()
        losses.append(reference.step([batch_of(step, m) for m in range(found.micro_batches)]))
    return model.state_dict(), optimizer.state_dict(), losses


# Equality with the reference


def verify_job(rank, world, cases):
    torch.set_num_threads(1)
    found = []
    for options, wish in cases:
        task = find("vision", {**small("vision"), **options})
        found.append(verify_workload(task, request=JobRequest(PlanRequest(schedule=wish)), steps=4, every_bit=True))
    return found


VIT = {"architecture": "vit", "width": 16, "depth": 2}
BATCH_NORM = {"norm": "batch"}
CORRECTIONS = ("weight_prediction", "stable_rate", "error_feedback")


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (1, [(VIT, also(ONE, micro_batches=3)), (BATCH_NORM, also(ONE, slack=1, stages=3)), (VIT, ROUND)]),
        (2, [(VIT, UP), (BATCH_NORM, also(UP, slack=3, micro_batches=3))]),
        (2, [(VIT, also(UP, corrections=list(CORRECTIONS)))]),
        (2, [(VIT, ROUND), (BATCH_NORM, also(ROUND, slack=2, stages=3))]),
        (2, [(VIT, ZERO), (BATCH_NORM, also(ZERO, slack=2, stages=3, clip_norm=0.1))]),
        pytest.param(
            1,
            [(VIT, also(ONE, clip_norm=0.1, slack=1)), (VIT, also(ONE, clip_norm=0.1, clip_by="previous"))],
            marks=pytest.mark.bits,
        ),
        (3, [(VIT, SHARED), (BATCH_NORM, also(SHARED, slack=2)), (VIT, also(SHARED, clip_norm=0.1, slack=1))]),
        pytest.param(
            2,
            [(VIT, also(ROUND, clip_norm=0.1, slack=1)), (VIT, also(ROUND, clip_norm=0.1, clip_by="stage"))],
            marks=pytest.mark.bits,
        ),
    ],
)
def test_vision_trains_as_the_reference_does_bit_for_bit_with_a_rate_drop_a_look_and_a_drain(crew, processes, cases):
    answers = crew(processes).run(verify_job, cases)
    for found in answers[0]:
        assert found.is_equal and found.tolerance == 0.0, str(found)
        assert found.workers == processes and len(found.differences) > 10
    assert all(answer == answers[0] for answer in answers)


def verify_in_a_mode(rank, world, mode, monkey=pytest.MonkeyPatch):
    with monkey.context() as patch:
        patch.setenv("MKL_CBWR", mode if rank == 0 else "COMPATIBLE")
        return verify_workload(find("vision", small("vision")), request=JobRequest(PlanRequest(schedule=UP)), steps=1)


def test_bits_are_only_claimed_where_every_process_was_asked_to_round_alike_at_every_address(crew):
    for found in crew(2).run(verify_in_a_mode, "COMPATIBLE"):
        assert (found.tolerance, found.note) == (0.0, "")
        said = " ".join(str(found).split())
        assert "NOT exact: " in said and "read weights one step old, forward and backward alike. The one" in said
    for found in crew(2).run(verify_in_a_mode, ""):
        assert found.is_equal and found.tolerance == 1e-10
        assert "note: compared to 1e-10 instead of every bit: MKL_CBWR was not set" in " ".join(str(found).split())


def verify_against_another_rule(rank, world, wish):
    """The reference is told another slack than the run."""
    real = cyclic_verify.ScheduleTruth
    late = Choice(wish.name, {**wish.options, "slack": 1})
    cyclic_verify.ScheduleTruth = lambda plan, *given: real(dataclasses.replace(plan, schedule=late), *given)
    try:
        return verify_job(rank, world, [(VIT, wish)])[0]
    finally:
        cyclic_verify.ScheduleTruth = real


@pytest.mark.parametrize(("processes", "wish"), EVERY)
def test_another_rule_is_not_called_equal(crew, processes, wish):
    for found in crew(processes).run(verify_against_another_rule, wish):
        assert not found.is_equal
        assert "NOT equal" in str(found)


def verify_against_one_bit(rank, world):
    """The last bit of one weight of the truth is turned."""
    real = cyclic_verify._truth_of_schedule

    def turned(case, is_whole):
        truth = real(case, is_whole)
        weight = next(iter(truth.values[0].values()))
        weight.flatten()[0] = torch.nextafter(weight.flatten()[0], torch.tensor(torch.inf, dtype=weight.dtype))
        return truth

    cyclic_verify._truth_of_schedule = turned
    try:
        return verify_job(rank, world, [(VIT, ONE)])[0]
    finally:
        cyclic_verify._truth_of_schedule = real


@pytest.mark.bits
def test_one_bit_of_one_weight_is_a_difference(crew):
    found = crew(1).run(verify_against_one_bit)[0]
    assert [one.verdict for one in found.differences].count("differs") == 1


# Looking, and saving


def look(rank, world, made):
    run, _ = driven(made)
    seen, losses = [], []
    for step in range(4):
        losses += trained(run, [step])
        run.evaluate([0], lambda net, batch: seen.append(copied(net)) or {"batches": 1.0})
    run._engine.drain()
    losses += run._engine.losses()
    return seen, losses, run.export()


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("processes", "options"), [(1, ONE), (2, UP), (2, also(ROUND, slack=1)), (2, ZERO), (3, SHARED)]
)
def test_an_evaluation_shows_the_newest_weights_everywhere_and_changes_nothing(crew, processes, options):
    answers = crew(processes).run(look, plan_of(options, processes))
    for rank, (seen, _, _) in enumerate(answers):
        for step, weights in enumerate(seen):
            assert same(weights, truth(options, processes, step + 1)[0]), (rank, step)
    model, optimizer, losses = truth(options, processes, 4)
    assert same(answers[0][2], {"model": dict(model), "optimizer": optimizer})
    assert all(answer[2] is None for answer in answers[1:])
    if options.name in ("ring", "zero_ring"):
        for rank, (_, got, _) in enumerate(answers):
            assert same([one.losses for one in got], [(step[rank],) for step in losses])
    else:
        for _, got, _ in answers:
            assert same([list(one.losses) for one in got], losses)


def save_on_the_way(rank, world, made, folder):
    run, _ = driven(made)
    trained(run, range(3))
    path = run.save(folder, loop={"step": 3, "feed": {}}, keep=1)
    trained(run, range(3, 5))
    return str(path), run.export()


def resume(rank, world, made, path):
    run, first = driven(made, path)
    trained(run, range(first, 5))
    return run.export()


def test_with_corrections_too_a_run_goes_on_from_a_checkpoint_as_the_one_that_wrote_it(crew, tmp_path):
    with_all = {"slack": 2, "corrections": list(CORRECTIONS)}
    one, up = also(ONE, **with_all), also(UP, **with_all)
    path, uninterrupted = crew(1).run(save_on_the_way, plan_of(one, 1), str(tmp_path))[0]
    for processes, options in ((1, one), (2, up)):
        assert same(crew(processes).run(resume, plan_of(options, processes), path)[0], uninterrupted), options
    assert not same(crew(1).run(resume, plan_of(also(ONE, slack=2), 1), path)[0], uninterrupted)


def drive_without_momentum(rank, world, made):
    model = model_of()
    with pytest.raises(ValueError, match="rank 0: weight_prediction wants momentum to go by"):
        started(made, model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch_of(0, 0))


def test_a_remedy_that_the_optimizer_cannot_have_is_refused(crew):
    crew(1).run(drive_without_momentum, plan_of(also(ONE, corrections=["weight_prediction"]), 1))


@pytest.mark.parametrize(("processes", "options"), EVERY)
def test_a_checkpoint_goes_on_in_another_mode_as_the_run_that_wrote_it_and_opens_in_plain_torch(
    crew, tmp_path, processes, options
):
    """With two stages and two micro-batches the modes follow one rule, dropout and optimizer state included. All write
    the same, so that each needs to be opened by one other only, and each opens one."""
    path, uninterrupted = crew(processes).run(save_on_the_way, plan_of(options, processes), str(tmp_path))[0]
    model, optimizer, _ = truth(ONE, 1, 5, drains=(3,))
    assert same(uninterrupted, {"model": dict(model), "optimizer": optimizer})
    others, another = EVERY[(EVERY.index((processes, options)) + 1) % len(EVERY)]
    assert same(crew(others).run(resume, plan_of(another, others), path)[0], uninterrupted)
    saved = torch.load(Path(path) / REST, weights_only=True)
    plain = model_of()
    plain.load_state_dict(saved["model"])
    assert same(dict(plain.state_dict()), dict(truth(ONE, 1, 3)[0]))


@pytest.mark.parametrize(("processes", "options"), [(1, ONE), (2, UP), (2, ROUND), (2, ZERO)])
def test_a_resumed_run_clips_as_the_run_that_was_saved(crew, tmp_path, processes, options):
    """No norm is saved: a checkpoint is a drain, and after a drain nobody asks for the norm of the step before."""
    made = plan_of(also(options, clip_norm=0.1, clip_by="previous"), processes)
    path, uninterrupted = crew(processes).run(save_on_the_way, made, str(tmp_path))[0]
    assert same(crew(processes).run(resume, made, path)[0], uninterrupted)
    assert not same(uninterrupted["model"], dict(truth(ONE, 1, 5, drains=(3,))[0]))


def test_a_resumed_run_draws_the_numbers_of_the_steps_it_has_come_to():
    for step in (0, 1, 1000):
        assert place_seed(seed_from_step(7, 12), (step, 1, 2)) == place_seed(7, (step + 12, 1, 2))


def held_weights(rank, world, made):
    """Bytes of the model's parameters on this process: between two steps, and in a look."""
    run, _ = driven(made)
    trained(run, range(2))
    between = bytes_of(run._engine.model)
    with run._engine.newest():
        return between, bytes_of(run._engine.model)


def bytes_of(model):
    """Every storage counted once."""
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(("processes", "options"), [(2, UP), (3, SHARED)])
def test_a_process_that_runs_one_stage_holds_the_weights_of_that_stage_only(crew, processes, options):
    whole = sum(parameter.nbytes for parameter in model_of().parameters())
    assert crew(processes).run(held_weights, plan_of(options, processes)) == [(whole // 2, whole)] * processes


# What is forecast


def count_bytes(rank, world, made):
    run, _ = driven(made)
    counts = []
    for part in (range(3), range(3, 7)):
        trained(run, part)
        run._engine.drain()
        counts.append(sum(sent for sent, _ in run._engine.parts.channel.take().values()))
    return counts, sum(group.forecast.sent_bytes for group in run.plan.groups)


CLIPPED = {"slack": 2, "clip_norm": 1.0}


@pytest.mark.parametrize(
    "options",
    [
        UP,
        ROUND,
        also(UP, micro_batches=4),
        also(ROUND, stages=4, slack=1),
        also(UP, **CLIPPED),
        also(ROUND, **CLIPPED, stages=4),
        also(ROUND, **CLIPPED, clip_by="stage"),
        SHARED,
        also(SHARED, **CLIPPED),
    ],
)
def test_the_bytes_forecast_are_the_bytes_sent(crew, options):
    processes = 3 if options.name == "shared_stages" else 2
    answers = crew(processes).run(count_bytes, plan_of(options, processes))
    sent = sum(counts[1] for counts, _ in answers)  # the first messages of a pipeline bring their form along
    assert sent == 4 * sum(planned for _, planned in answers) > 0


def count_undrained(rank, world, made):
    """A step that opens sends more: it is not counted."""
    run, _ = driven(made)
    trained(run, range(2))
    run._engine.parts.channel.take()
    trained(run, range(2, 6))
    return sum(sent for sent, _ in run._engine.parts.channel.take().values()), sum(
        group.forecast.sent_bytes for group in run.plan.groups
    )


@pytest.mark.parametrize("options", [ZERO, also(ZERO, stages=4, slack=1), also(ZERO, **CLIPPED, stages=4)])
def test_the_bytes_forecast_of_a_zero_ring_are_the_bytes_sent(crew, options):
    answers = crew(2).run(count_undrained, plan_of(options, 2))
    assert sum(sent for sent, _ in answers) == 4 * 2 * answers[0][1] > 0


# What is refused


def read_out_of_turn(rank, world, made):
    run, _ = driven(made)
    trained(run, range(2))
    model, inputs = run._engine.model, batch_of(0, 0)[0]
    with pytest.raises(RuntimeError, match=r"reads weights of stage \d, which are not here.* Use run\.evaluate"):
        model(inputs)
    with run._engine.newest():
        inside = model(inputs).isfinite().all()
    with pytest.raises(RuntimeError, match="which are not here"):
        model(inputs)
    run.close()
    return bool(inside and model(inputs).isfinite().all()), [m._forward_pre_hooks for m in model.modules()]


def test_weights_that_are_lent_are_refused_by_name_to_who_reads_them_out_of_turn(crew):
    """And after `close` the model is whole and plain."""
    for is_finite, hooks in crew(2).run(read_out_of_turn, plan_of(ZERO, 2)):
        assert is_finite and not any(hooks)


def refused(task_loss, match):
    with pytest.raises(ValueError, match=match):
        SplitLoss(task_loss, model_of(), batch_of(0, 0))


def test_a_loss_that_cannot_be_taken_apart_is_refused_before_the_first_step():
    refused(lambda model, batch: loss(model, batch) + sum(p.square().sum() for p in model.parameters()), "a penalty")
    refused(lambda model, batch: loss(lambda x: model(model(x)), batch), "more than once")
    refused(lambda model, batch: model[0](batch[0]).sum(), "uses the model's 0")
    refused(lambda model, batch: model.append(nn.Identity())(batch[0]).sum(), "uses the model's 'append'")
    refused(lambda model, batch: torch.ones(()), "never calls the model")
    refused(lambda model, batch: model(input=batch[0]).sum(), "by name")


def test_autocast_inside_of_a_loss_is_refused_with_the_place_where_it_belongs():
    def inside(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    model, batch = model_of().float(), [one.float() for one in batch_of(0, 0)]
    with pytest.raises(ValueError, match=r"under autocast to bfloat16.*there is no autocast.*around every run\.step"):
        SplitLoss(inside, model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        SplitLoss(loss, model, batch)


def test_a_scaled_loss_is_refused_unless_the_scaler_is_switched_off():
    scale = torch.amp.GradScaler.scale
    refused(
        lambda model, batch: torch.amp.GradScaler("cpu").scale(loss(model, batch)), "scaled by a GradScaler.*bfloat16"
    )
    off = torch.amp.GradScaler("cpu", enabled=False)
    SplitLoss(lambda model, batch: off.scale(loss(model, batch)), model_of(), batch_of(0, 0))
    assert torch.amp.GradScaler.scale is scale


class Tied(nn.Module):
    """One parameter under two names, or read again by the forward."""

    def __init__(self, is_named):
        super().__init__()
        self.embed, self.body, self.head = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.is_named = is_named
        if is_named:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, value):
        value = torch.tanh(self.body(self.embed(value)))
        return self.head(value) if self.is_named else self.head(functional.linear(value, self.embed.weight))


def tied_models():
    """(model, where its two uses are)."""
    chain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))).double()
    chain[2].weight = chain[0].weight
    return [
        (chain, "0.weight of stage 0 and 2.weight of stage 1 are one parameter"),
        (Tied(True), "embed.weight of stage 0 and head.weight of stage 1 are one parameter"),
        (Tied(False), "embed.weight of stage 0 and embed.weight of stage 1 are one parameter"),
    ]


def drive_tied(rank, world, choice):
    """What is said when a plan that knows nothing of the tie is carried out."""
    said = []
    for model, _ in tied_models():
        names = [name for name, _ in model.named_parameters()]
        point = names[1].removesuffix(".weight")
        groups = tuple(
            Group(f"stage {j}", tuple(part), "stage_sharded", None, stage=j, departures=("stale",))
            for j, part in enumerate((names[:1], names[1:]))
        )
        shapes = [(name, tuple(p.shape), "float64") for name, p in model.named_parameters()]
        axis = SCHEDULES[choice.name].axis
        stages, mesh = (StagePlan("0"), StagePlan(point)), Mesh((Axis(axis, world),))
        made = Plan(mesh, groups, model_fingerprint(shapes), schedule=choice, stages=stages)
        with pytest.raises(ValueError, match="its two uses would see weights of different age") as caught:
            started(made, model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch_of(0, 0))
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize(("processes", "choice"), EVERY)
def test_weights_tied_across_stages_are_refused_in_every_mode_with_both_places(crew, processes, choice):
    for said in crew(processes).run(drive_tied, choice):
        for sentence, (_, places) in zip(said, tied_models(), strict=True):
            assert places in sentence


@pytest.mark.parametrize(("processes", "choice"), EVERY)
def test_a_plan_for_weights_tied_by_name_is_refused_with_both_places_unless_one_stage_holds_both(processes, choice):
    link = Link(1e-4, 1e8)
    topology = Topology(1, processes, link, link, 1 << 33)
    for model, places in tied_models()[:2]:
        batches = [batch_of(0, 0)] * processes
        facts = profile(model, batches, loss, workers=processes)
        point = [stage.name for stage in facts.stages][1]
        with pytest.raises(ValueError, match=places):
            plan(facts, topology, schedule=also(choice, stages=2, points=[point]))


def test_replicas_of_stages_refuse_tied_weights():
    link = Link(1e-4, 1e8)
    (_, (model, _), _) = tied_models()
    facts = profile(model, [batch_of(0, 0)] * 4, loss, workers=4)
    choice = Choice("gpipe", {"stages": 2, "points": [[stage.name for stage in facts.stages][1]]})
    said = r"with 2 replicas of the stages \(data x stage\) the gradients of its copies are not summed.* as many stages"
    with pytest.raises(ValueError, match=said):
        plan(facts, Topology(1, 4, link, link, 1 << 33), schedule=choice)


def workload_refusal(rank, world, name):
    task = find(name, small(name))
    with pytest.raises(ValueError, match=r"stages|schedule") as caught:
        verify_workload(task, request=JobRequest(PlanRequest(schedule=ONE)))
    return str(caught.value)


def test_a_model_that_cannot_be_cut_is_refused_by_name(crew):
    said = crew(1).run(workload_refusal, "translation")[0]
    assert "the plan counts target.weight in stage 0, the model reads it in stage 1" in said


def edited(made, **options):
    return dataclasses.replace(made, schedule=also(made.schedule, **options))


def misuse(rank, world, made, alone):
    model, other = model_of(), nn.Sequential(nn.Linear(2, 2))
    said = []
    for attempt in (
        lambda: attach(made, model, optimizer_of(model)),
        lambda: started(alone, model, optimizer_of(model), loss, batch_of(0, 0)),
        lambda: started(edited(made, points=["1"]), model, optimizer_of(model), loss, batch_of(0, 0)),
        lambda: started(made, other, optimizer_of(other), loss, batch_of(0, 0)),
        lambda: driven(made)[0].step([batch_of(0, 0)]),
    ):
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))
    return said


def test_misuse_is_answered_with_what_to_do(crew):
    for said in crew(2).run(misuse, plan_of(UP, 2), plan_of(ONE, 1)):
        owns, workers, contradiction, model, count = said
        assert "has points=['1'], the stage table says ['2']; drop points" in contradiction
        assert (
            "needs loss and example" in owns
            and "run.step(micro_batches)" in owns
            and count.startswith("run.step: rank")
        )
        assert "the plan is for 1 worker, this job has 2" in workers and "made for another model" in model


# The training run


def train_job(rank, world, folder, steps, is_resumed, options):
    torch.set_num_threads(1)
    task = find("vision", {**small("vision"), "batch_size": 8})
    request = JobRequest(PlanRequest(schedule=options))
    settings = Settings(Path(folder), steps, every_steps=6, every_seconds=0.0, resume=is_resumed, request=request)
    return list(train(task, settings))


def last_model(folder):
    newest = max((folder / "checkpoints").glob("step-*"))
    return torch.load(newest / REST, weights_only=True)["model"]


@pytest.mark.parametrize(
    ("processes", "options"),
    [(2, UP), (2, also(ZERO, stages=4)), (2, Choice("delayed_all_reduce", {"clip_norm": 0.05}))],
)
def test_training_tells_what_it_does_learns_and_resumes_to_the_same_weights(crew, tmp_path, processes, options):
    whole = crew(processes).run(train_job, str(tmp_path / "whole"), 12, False, options)
    kinds = [type(event) for event in whole[0]]
    assert kinds[0] is PlannedJob and kinds[-1] is Ended and kinds.count(Saved) == 2 and Evaluated in kinds
    ended = whole[0][-1]
    assert ended.steps == 12
    if not options.options.get("clip_norm"):  # which leaves twelve steps too short
        assert ended.metrics["nats_per_image"] < 1.3  # four classes: log 4 is 1.386
    measured, forecast = ended.comparison[0].measured, ended.comparison[0].forecast
    assert measured.sent_bytes == pytest.approx(forecast.sent_bytes, rel=0.1)
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half/checkpoints/step-00000012")
    going_on = crew(processes).run(train_job, str(tmp_path / "half"), 12, True, options)
    assert [event.step for event in going_on[1] if isinstance(event, Resumed)] == [6]
    assert same(last_model(tmp_path / "half"), last_model(tmp_path / "whole"))
    assert (tmp_path / "half" / "plot.png").exists()


def test_options_are_those_of_the_plan():
    assert options_of(plan_of(UP, 2)) == read(Choice("pipeline", {"micro_batches": 2, "slack": 0, "points": ["2"]}), 2)
