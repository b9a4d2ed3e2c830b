"""What the command line has, a script reaches: verify, simulate, metrics, a profiler's names, a notebook's plan."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from small_models import OPTIMIZERS, Reader, chain, pair_batch, pair_loss, word_batch, word_loss

import armillary
import face
from armillary.session.traffic_meter import TrafficMeter


def batches_of(count):
    return [word_batch(number // 2, number % 2) for number in range(count)]


def scripted(rank, world, optimizer, loss=word_loss):
    """Verifies a script's model; the answer, and what it says."""
    torch.manual_seed(3)
    model = Reader()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = OPTIMIZERS[optimizer](model.parameters())
    found = armillary.verify(model, made, batches_of(12), loss)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not made.state and model.words.weight.dtype == torch.float32
    return found.is_equal, str(found)


def with_state(rank, world):
    """The optimizer has stepped before, so that its state counts."""
    torch.manual_seed(3)
    model = Reader()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    word_loss(model, word_batch(0, 0)).backward()
    optimizer.step()
    return armillary.verify(model, optimizer, batches_of(8), word_loss, steps=2, exchanges=("owned_rows",)).is_equal


def ranks_own_loss(model, batch):
    return word_loss(model, batch) * (1 + 0.001 * int(os.environ["RANK"]))


def other_batches(rank, world):
    model = Reader()
    batches = [word_batch(rank, number) for number in range(12)]
    with pytest.raises(ValueError, match="ranks draw other batches than rank 0; give every rank the same"):
        armillary.verify(model, OPTIMIZERS["sgd"](model.parameters()), batches, word_loss)
    with pytest.raises(ValueError, match="batches gave 5, which does not do for 3 steps of 2 batches each; give 6"):
        armillary.verify(model, OPTIMIZERS["sgd"](model.parameters()), batches_of(5), word_loss, steps=3)
    with pytest.raises(ValueError, match="8 of the 8 tensors of the optimizer are not parameters of the model"):
        armillary.verify(model, OPTIMIZERS["sgd"](chain().parameters()), batches_of(5), word_loss)


def test_a_script_verifies_its_own_model_on_its_own_batches(crew):
    for is_equal, said in crew(2).run(scripted, "adam"):
        assert is_equal and "2 workers on 1 node and one process are equal after 5 steps in float64" in said, said
        assert "owned_rows" in said and "all_reduce" in said
    assert crew(2).run(with_state) == [True, True]


def test_verify_in_a_script_finds_a_loss_that_differs_by_rank(crew):
    for is_equal, said in crew(2).run(scripted, "sgd", ranks_own_loss):
        assert not is_equal and "NOT equal" in said, said


def test_verify_in_a_script_refuses_other_batches_too_few_and_a_foreign_optimizer(crew):
    crew(2).run(other_batches)


def scheduled(rank, world):
    model = chain(0.0)
    batches = [pair_batch(step, number) for step in range(5) for number in range(2)]
    schedule = armillary.Choice.parse("pipeline")
    found = armillary.verify(model, OPTIMIZERS["adam"](model.parameters()), batches, pair_loss, schedule=schedule)
    return found.is_equal, str(found)


def test_verify_in_a_script_follows_a_schedule(crew):
    for is_equal, said in crew(2).run(scheduled):
        assert is_equal and "pipeline" in said, said


def watched(rank, world, plan, folder):
    """Three steps, the last under torch's profiler."""
    run = face.start(plan, model := Reader(), OPTIMIZERS["sgd"](model.parameters()), word_loss)
    loop = run.optimizer
    assert run.run.metrics() == {}
    for step in range(2):
        loop.zero_grad()
        word_loss(model, word_batch(step, rank)).backward()
        loop.step()
    told = run.run.metrics() if rank == 0 else {}
    with torch.profiler.profile() as seen:
        loop.zero_grad()
        word_loss(model, word_batch(2, rank)).backward()
        loop.step()
    report = run.run.report()
    face.close(run)
    return told, report, {event.key for event in seen.key_averages()}


def test_metrics_of_a_step_are_the_report_s_and_the_profiler_shows_our_names(crew, tmp_path):
    plan = face.plan_for(Reader(), word_loss, batches_of(4), 2, exchange={"words.weight": "owned_rows"})
    (told, report, names), _ = crew(2).run(watched, plan, str(tmp_path))
    groups = {line.group for line in report.lines}
    assert told["steps"] == 2 and told["step_seconds"] > 0
    assert told["sent_bytes"] == pytest.approx(sum(told[f"sent_bytes/{group}"] for group in groups))
    dense = next(line for line in report.lines if line.exchange.startswith("all_reduce"))
    assert told[f"sent_bytes/{dense.group}"] == dense.measured.sent_bytes > 0
    assert f"armillary::{dense.group}.AllReduce" in names and f"armillary::{dense.group}.wait" in names, names
    assert any(name.startswith("armillary::words.weight.") for name in names)
    assert f"a step took {report.step_seconds * 1e3:.2f} ms (forecast {plan.step_seconds * 1e3:.2f} ms)" in str(report)


def test_the_seconds_of_a_step_in_a_report_are_the_median_so_an_evaluation_between_two_steps_does_not_show(monkeypatch):
    traffic_meter = TrafficMeter(face.plan_for(Reader(), word_loss, batches_of(4), 2))
    assert traffic_meter.step_seconds == 0
    for now in (10.0, 12.0, 15.0, 95.0, 97.0):  # the fourth came late: 2, 3, 80 and 2 seconds
        monkeypatch.setattr("time.perf_counter", lambda now=now: now)
        traffic_meter.end_step()
    assert traffic_meter.step_seconds == 2.5 and traffic_meter.steps == 5


def test_a_script_plays_its_plan_on_other_machines_and_keeps_the_trace(tmp_path):
    seen = armillary.profile(Reader(), batches_of(4), word_loss, workers=2)
    plan = armillary.plan(seen, face.machines(2))
    played = armillary.simulate(plan, seen, face.machines(2).of(8))
    assert "step of 8 workers: " in str(played) and played.step_seconds > 0
    assert json.loads(played.save(tmp_path / "new").read_text())["traceEvents"]


def test_a_plan_shows_itself_in_a_notebook():
    plan = face.plan_for(Reader(), word_loss, batches_of(4), 2)
    shown = plan._repr_html_()
    assert shown.startswith("<pre") and "words.weight" in shown and "<>" not in shown
    assert shown.startswith(f'<pre style="overflow-x: auto; white-space: pre">{str(plan).splitlines()[0]}')


def seen_and_planned(model, batches, loss, **asked):
    """A profile, and a plan made of it for two workers."""
    seen = armillary.profile(model, batches, loss, workers=2)
    return seen, armillary.plan(seen, face.machines(2), **asked)


def left(rank, world, folder, seen, plan):
    """A script that plans before its first step; what its report says."""
    given = {"profile": seen, "topology": face.machines(2)}
    run = face.start(plan, model := Reader(), OPTIMIZERS["adam"](model.parameters()), word_loss, **given)
    for step in range(4):
        face.step(run, [word_batch(step % 2, rank)])  # those of the profile
    found = run.run.report(folder)
    checkpoint = run.run.save(f"{folder}-saved")
    face.close(run)
    run = face.start(plan, model := Reader(), OPTIMIZERS["adam"](model.parameters()), word_loss, **given)
    run.run.load(checkpoint)
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    told = "the plan has taken 0 steps, and a folder to compare wants 2 at least; .*mine is left as it is"
    with nullcontext() if rank else pytest.warns(UserWarning, match=told):
        assert run.run.report(folder).steps == 0  # a job that had ended, started once more
    assert before == {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    face.close(run)
    return found


def test_a_script_leaves_a_folder_that_compare_reads_and_a_wrong_forecast_is_found(crew, tmp_path):
    decided = seen_and_planned(Reader(), batches_of(4), word_loss, constraints={"words.weight": "owned_rows"})
    report, _ = crew(2).run(left, str(tmp_path / "mine"), *decided)
    loose = ("--seconds", "1", "--memory", "1")  # a busy machine, and a model of which alignment is half
    told = face.command("compare", "mine", "--json", *loose, folder=tmp_path)
    assert told.code == 0, told
    lines = {line["group"]: line for line in json.loads(told.out)["lines"]}
    said = str(report).splitlines()
    last = next(place for place, line in enumerate(said) if line.startswith("rest of the step"))
    all_, rest = (line.split()[-2:] for line in said[last - 1 : last + 1])
    for whole, flown, left_over in zip((report.forecast_seconds, report.step_seconds), all_, rest, strict=True):
        assert left_over == "-" or float(flown) + float(left_over) == pytest.approx(whole * 1e3, abs=0.011)
    other = next(line for line in report.lines if line.group == "other requests")
    assert other.forecast.seconds > 0, "headers of look-ups are foreseen"
    for line in report.lines:
        for side in ("forecast", "measured"):
            assert lines[line.group][side]["sent_bytes"] == getattr(line, side).sent_bytes, (line.group, side)
            assert lines[line.group][side]["seconds"] == pytest.approx(getattr(line, side).seconds, rel=1e-3)
    wrong = json.loads((tmp_path / "mine" / "plan.json").read_text())
    dense = next(group for group in wrong["groups"] if "words.weight" not in group["parameters"])
    dense["forecast"]["sent_bytes"] *= 1.1
    (tmp_path / "mine" / "plan.json").write_text(json.dumps(wrong))
    told = face.command("compare", "mine", *loose, folder=tmp_path)
    assert told.code == 3 and dense["name"] in told.out and "to do: time outside means" in told.out, told
    assert face.command("compare", "nobody", folder=tmp_path).code == 2


def left_by_the_one_line(rank, world, folder):
    """The same of a script that gave no batches: its plan comes from its first two steps."""
    model = Reader()
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    run = armillary.parallelize(model, optimizer, constraints={"words.weight": "owned_rows"})
    for step in range(6):
        if step == 1:  # still watched
            with pytest.raises(ValueError, match="does not know what its plan was made from"):
                run.report(folder)
        optimizer.zero_grad()
        word_loss(model, word_batch(step % 2, rank)).backward()
        optimizer.step()
    steps = run.report(folder).steps
    run.close()
    return steps


def test_the_one_line_leaves_a_folder_that_compare_reads_once_its_watched_steps_are_over(crew, tmp_path):
    assert crew(2).run(left_by_the_one_line, str(tmp_path / "mine")) == [4, 4]
    told = face.command("compare", "mine", "--seconds", "1", "--memory", "1", folder=tmp_path)
    assert told.code == 0, told.out  # watched steps are not counted to the plan's groups


def unknowing(rank, world, folder, plan):
    run = face.start(plan, model := Reader(), OPTIMIZERS["sgd"](model.parameters()), word_loss)
    face.step(run, [word_batch(0, rank)])
    (told,) = [line for line in str(run.run.report()).splitlines() if line.startswith("other requests")]
    assert told.split()[2:8:2] == ["-", "-", "-"], told
    with pytest.raises(ValueError, match="does not know what its plan was made from, which compare plays; give attach"):
        run.run.report(folder)
    face.close(run)


def test_a_script_whose_run_does_not_know_its_profile_is_told_why_it_can_leave_no_folder(crew, tmp_path):
    spread = {"words.weight": "owned_rows"}  # so there are look-ups, which are of no group
    crew(2).run(unknowing, str(tmp_path), face.plan_for(Reader(), word_loss, batches_of(4), 2, exchange=spread))
    assert not list(tmp_path.iterdir())


PAIRS = [pair_batch(step, number) for step in range(3) for number in range(4)]


def piped(rank, world, folder, seen, plan):
    """Under a schedule; what the report says."""
    model, batches = chain(0.0), PAIRS
    given = {"profile": seen, "topology": face.machines(2)}
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), pair_loss, batches[0], **given)
    for step in range(3):
        face.step(run, batches[4 * step :][:4])
    found = run.run.report(folder)
    face.close(run)
    return found


def test_edges_of_a_report_have_the_forecast_of_compare(crew, tmp_path):
    schedule = face.schedule_named("gpipe(micro_batches=4)")
    decided = seen_and_planned(chain(0.0), PAIRS[:4], pair_loss, schedule=schedule)
    report, other = crew(2).run(piped, str(tmp_path / "mine"), *decided)
    told = face.command("compare", "mine", "--json", "--seconds", "1", "--memory", "1", folder=tmp_path)
    assert told.code == 0, told
    lines = {line["group"]: line for line in json.loads(told.out)["lines"]}
    assert {edge.name for edge in report.edges} == {"activation of stage 0", "activation gradient of stage 1"}
    for edge in report.edges:
        assert edge.forecast.sent_bytes == lines[edge.name]["forecast"]["sent_bytes"] == edge.measured.sent_bytes > 0
        assert edge.forecast.seconds == pytest.approx(lines[edge.name]["forecast"]["seconds"]) and edge.forecast.seconds
        assert edge.measured.seconds == pytest.approx(lines[edge.name]["measured"]["seconds"], rel=1e-3)
    assert "of which, by edge" in str(report) and str(report) == str(other)
