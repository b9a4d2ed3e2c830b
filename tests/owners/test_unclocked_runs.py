"""What a user of updates without a common clock sees: one model in every call of all ranks, whatever their counts;
batches dealt to whoever is free; checkpoints that any plan opens; refusals by name; nobody hangs."""

import json
import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from unclocked import (
    OPTIMIZERS,
    batch_of,
    began,
    loss,
    machines,
    model_of,
    own_batch,
    plan_of,
    profile_of,
    replay_of,
    trained,
)

import armillary
from armillary.cli.names import find, small
from armillary.cli.terminal import ended_page
from armillary.planning.planner import plan
from armillary.planning.request import PlanRequest
from armillary.plans import Choice, Plan
from armillary.plans.group import Band
from armillary.schedules import options_of
from armillary.session.compare import compare_run
from armillary.session.plan_job import JobRequest
from armillary.session.train import train
from armillary.session.train_settings import Settings
from forked import Job

NUMBERS = range(30)


def whole(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def journey(rank, world, folder):
    """A slow rank 0; epochs that are dealt; a look, a checkpoint and the end."""
    model = model_of()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    batches = [batch_of(number) for number in NUMBERS]
    with armillary.parallelize(model, optimizer, batches[: 2 * world], loss, schedule="asynchronous(bound=3)") as run:
        taken = []
        for _ in range(2):
            for number in run.shard(NUMBERS):
                time.sleep(0.04 if rank == 0 else 0.001)
                (found,) = run.step([batches[number]])
                assert len(found.losses) == 1
                taken.append(number)
        totals = run.evaluate([batches[rank]], lambda model, batch: {"loss": float(loss(model, batch))})
        path = run.save(folder)
        exported = run.export()
        report, metrics = str(run.report()), run.metrics()
        run.step([batches[0]])
    return {
        "taken": taken, "totals": totals, "path": path, "exported": exported, "report": report, "metrics": metrics,
        "model": whole(model), "state": len(optimizer.state), "kinds": {type(one) for one in model.parameters()},
        "schedule": str(run.plan.schedule),
    }  # fmt: skip


def resumed(rank, world, path, schedule):
    model = model_of()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    made = plan(profile_of(world), machines(world), schedule=schedule)
    run = armillary.attach(made, model, optimizer, loss=loss, example=batch_of(0))
    run.load(path)
    exported = run.export()
    run.step([own_batch(rank, 0)])
    run.close()
    return exported


@pytest.fixture(scope="module")
def three(crew, tmp_path_factory):
    return crew(3).run(journey, tmp_path_factory.mktemp("runs"))


def test_every_batch_is_some_ranks_once_an_epoch_and_the_slow_rank_gets_fewer(three):
    both = sorted(number for one in three for number in one["taken"])
    assert both == sorted([*NUMBERS, *NUMBERS])
    assert len(three[0]["taken"]) < min(len(one["taken"]) for one in three[1:])


def test_all_ranks_see_one_model_and_are_plain_at_the_end(three):
    assert three[0]["totals"] == three[1]["totals"] == three[2]["totals"]
    for one in three:
        assert one["kinds"] == {nn.Parameter} and one["state"] == len(list(model_of().parameters()))
        assert all(torch.equal(value, three[0]["model"][name]) for name, value in one["model"].items())
    assert three[0]["exported"] is not None and three[1]["exported"] is None


def test_the_report_shows_staleness_and_the_bytes(three):
    report = three[0]["report"]
    assert "updates staler by" in report and "pulls that waited" in report and "steps of rank 2" in report
    assert three[0]["metrics"]["sent_bytes"] > 0 and three[0]["metrics"]["sent_bytes/words.weight"] > 0
    assert three[0]["schedule"] == "asynchronous(bound=3)"


def test_seconds_that_nobody_measures_are_told_as_not_known(three):
    report, metrics = three[0]["report"], three[0]["metrics"]
    lines = {line.split()[0]: line for line in report.splitlines() if line.strip()}
    assert lines["words.weight"].rstrip().endswith("not known") and lines["whole"].rstrip().endswith("not known")
    assert not [name for name in metrics if name.startswith("in_flight_seconds")]


def by_command(rank, world, folder):
    """What `armillary train` prints at its end, and what it leaves."""
    torch.set_num_threads(1)
    task = find("recommender", {**small("recommender"), "batch_size": 8})
    request = JobRequest(PlanRequest(schedule=Choice("asynchronous")))
    *_, ended = train(task, Settings(folder, 6, every_steps=3, every_seconds=0.0, request=request))
    return "\n".join(map(str, ended_page(ended, "samples", folder)))


def test_a_trained_workload_ends_with_its_histogram_too(crew, tmp_path):
    printed, _ = crew(2).run(by_command, tmp_path)
    assert "updates staler by" in printed and "pulls that waited" in printed and "not known" in printed
    said = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert said["comparison"][0]["measured"]["seconds"] is None
    with pytest.raises(ValueError, match="schedule asynchronous nobody measures"):
        compare_run(tmp_path, Band())


@pytest.mark.parametrize("schedule", ["simultaneous", "asynchronous(bound=None)"])
def test_a_checkpoint_opens_on_other_ranks_under_another_plan(three, crew, schedule):
    exported, saved = crew(2).run(resumed, three[0]["path"], schedule)[0], three[0]["exported"]
    assert all(torch.equal(exported["model"][name], one) for name, one in saved["model"].items())
    for number, entries in saved["optimizer"]["state"].items():
        assert all(torch.equal(exported["optimizer"]["state"][number][key], one) for key, one in entries.items())


def dealt(rank, world):
    """Two epochs of dealt batches, replayed by the numbers that the log holds."""
    run, model, stepping = began(world, 2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stepping, 0.8)
    for _ in range(2):
        for number in run.shard(range(10)):
            time.sleep(0.002 * rank)
            run.step([batch_of(number)])
            scheduler.step()
    engine = run._engine
    logs = engine.logs()
    with engine.newest():
        mine = whole(model)
    run.close()
    truth = replay_of(logs, engine, "momentum", lambda event: batch_of(event.batch))
    epochs = {event.epoch for log in logs for event in log if event.batch >= 0}
    return epochs, [name for name, one in truth.items() if not torch.equal(one, mine[name])]


def test_the_log_holds_which_batch_was_dealt(crew):
    for epochs, differing in crew(2).run(dealt):
        assert epochs == {0, 1} and not differing


def uneven(rank, world):
    """Ranks with unlike numbers of batches of their own: who is done is waited for by nobody."""
    run, _, stepping = began(world, 1)
    trained(run, stepping, 3 + 9 * rank, random.Random(rank))
    (totals,) = [run.evaluate([batch_of(0)], lambda model, batch: {"loss": float(loss(model, batch))})]
    run.close()
    return totals


def test_a_rank_that_is_done_holds_up_nobody(crew):
    first, second = crew(2).run(uneven)
    assert first == second


# Refusals


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("asynchronous(bound=-1)", "bound=-1; want 0 or more steps, or None"),
        ("asynchronous(bound=1.5)", "bound=1.5; want 0 or more"),
        ("asynchronous(clip_norm=1.0)", "cannot clip by a global norm"),
        ("asynchronous(micro_batches=2)", "accumulates nothing"),
        ("asynchronous(slack=1)", "has no slack"),
    ],
)
def test_options_that_cannot_be_are_refused_where_they_are_asked(schedule, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        plan(profile_of(2), machines(2), schedule=schedule)


def test_a_mean_by_weights_and_constraints_are_refused_by_the_plan():
    for asked in ({"mean": "weights"}, {"constraints": {"*": "all_reduce"}}, {"allow": ("lossy",)}):
        with pytest.raises(ValueError, match="under schedule asynchronous"):
            plan(profile_of(2), machines(2), schedule="asynchronous", **asked)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, given):
        return self.norm(self.inner(given))


class Mixing(torch.optim.SGD):
    """Scales a table's gradient by the norm over all of its rows."""

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.grad.div_(one.grad.norm() + 1.0)
        super().step()


def refused_attach(**asked):
    """On one rank: the words in which it is refused. The plan was made for SGD."""
    model = asked.pop("model", None) or model_of()
    optimizer = asked.pop("optimizer", OPTIMIZERS["momentum"])(model.parameters())
    given = {"loss": loss, "example": batch_of(0), **asked}
    before = whole(model)
    with pytest.raises(ValueError, match="schedule asynchronous") as refused:
        armillary.attach(given.pop("plan", plan_of(1, 4)), model, optimizer, **given)
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
    return str(refused.value)


def test_what_a_run_cannot_have_is_refused_by_name():
    assert "needs loss: attach(plan, model, optimizer, loss=loss), then run.step([batch])" in refused_attach(loss=None)
    assert "example" not in refused_attach(loss=None, example=None)
    assert "check_order=True" in refused_attach(check_order=True)
    assert "check_finite=True" in refused_attach(check_finite=True)
    assert "GradScaler" in refused_attach(scaler=torch.amp.GradScaler("cpu"))
    assert "cannot go by row, as Mixing" in refused_attach(optimizer=Mixing)


def test_batch_norm_is_refused_by_name():
    from armillary.profiler.profiler import profile

    def mean(model, batch):
        return model(batch).square().mean()

    seen = profile(Normed(), [torch.ones(4, 3)], mean)
    made = plan(seen, machines(1), schedule="asynchronous")
    said = refused_attach(model=Normed(), plan=made, loss=mean, example=torch.ones(4, 3))
    assert "norm (BatchNorm) keeps; take GroupNorm" in said


def test_calls_of_a_run_that_have_no_meaning_are_refused_by_name():
    run, _, optimizer = began(1, 4)
    with run:
        for call, said in (
            (run.no_sync, "nothing accumulates"),
            (lambda: run.weigh(2.0), "no mean over ranks"),
            (lambda: run.batches([]), "use run.shard"),
            (lambda: run.ema(0.9), "with their owners between steps"),
            (lambda: run.step([batch_of(0), batch_of(1)]), "want one batch, got 2"),
        ):
            with pytest.raises(ValueError, match=said):
                call()
        with pytest.raises(RuntimeError, match=r"call that alone"):
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"optimizer.state_dict"):
            optimizer.state_dict()
        run.step([batch_of(0)])


# The plan


def test_equal_ranks_can_only_lose_and_the_plan_says_so():
    said = " ".join(plan_of(4, 4).notes)
    assert "it can only lose" in said and "NOT exact" in said and "read whole" in said


def test_a_slow_rank_brings_something_without_a_bound_alone():
    held, free = (plan_of(4, bound, rates=(1.0, 1.0, 1.0, 30.0)) for bound in (4, None))
    assert free.step_seconds < held.step_seconds / 1.3
    assert "it is expected to bring" in " ".join(free.notes)
    assert "with bound=None a round of updates would take" in " ".join(held.notes)


def test_plans_go_to_json_and_back_bounds_too():
    for bound in (0, 4, None):
        made = plan_of(2, bound)
        again = Plan.from_json(made.to_json())
        assert again == made and options_of(again).bound == bound


def test_simulate_plays_it():
    played = armillary.simulate(plan_of(2, 4), profile_of(2), machines(2))
    assert played.step_seconds > 0 and "words.weight" in str(played)
    assert armillary.check("asynchronous")


def test_rates_go_to_json_and_are_of_as_many_ranks():
    rated = machines(2, rates=(1.0, 3.0))
    assert type(rated).from_json(rated.to_json()) == rated
    assert not rated.of(4).rates and rated.of(2).rates
    with pytest.raises(ValueError, match="rates want a number >= 1 for each of 2 ranks"):
        replace(rated, rates=(1.0,))


# Nobody waits for ever


def killed(rank, ranks, folder):
    dist.init_process_group("gloo")
    run, _, _ = began(ranks, 0, report_after=1.0, timeout=4.0)
    run.step([own_batch(rank, 0)])
    run.save(folder)
    for step in range(1, 9):
        if (rank, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        run.step([own_batch(rank, step)])


def test_a_rank_killed_in_a_bound_wait_is_named_and_the_last_checkpoint_opens(tmp_path):
    began_at = time.monotonic()
    first, second = Job(2, killed, tmp_path).ended()
    assert second.code == -signal.SIGKILL and first.code == 1
    assert "rank 1" in first.err and "no sign of life" in first.err, first.err
    assert time.monotonic() - began_at < 60
    model = model_of()
    run = armillary.attach(plan_of(1, 4), model, OPTIMIZERS["momentum"](model.parameters()), loss=loss, example=None)
    run.load(armillary.latest_checkpoint(tmp_path))
    run.close()
    assert not torch.equal(model.out.weight, model_of().out.weight)
