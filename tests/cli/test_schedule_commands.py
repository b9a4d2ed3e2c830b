"""Schedules on the command line: typed as they print, the picture before anything runs, clear refusals."""

import json
import re

import pytest

from armillary.plans import Link, Plan, Topology
from armillary.schedules import SCHEDULES, options_of
from armillary.schedules.cyclic import cyclic
from armillary.schedules.shared_stages import SharedPlacement
from face import command_in_job, machines
from schedule_pictures import parse

VISION = ("vision", "--small", "--set", "architecture=vit", "--set", "width=16", "--set", "depth=2")


def on_one(*options: str) -> tuple[str, ...]:
    """Three staggered micro-batches in one process."""
    choice = ", ".join(("micro_batches=3", *options))
    return ("--schedule", f"one_device({choice})", "--workers", "1")


def test_plan_prints_the_picture_of_the_schedule_below_the_table_and_that_it_is_not_exact(armillary, tmp_path):
    out_file = tmp_path / "plan.json"
    code, out, err = armillary("plan", *VISION, *on_one("slack=1"), "--out", out_file)
    assert (code, err) == (0, "")
    made = Plan.load(out_file)
    picture = options_of(made).picture()
    drawn, _, written = out[out.index("cyclic: 3 workers, 3 stages, 3 micro-batches") :].partition("written: ")
    assert parse(drawn) == parse(picture) and out_file.name in written
    assert "NOT exact: 67% of the pairs" in out and "gradient accumulation" in out
    assert (made.workers, made.schedule.options["slack"]) == (1, 1)
    code, out, err = armillary("train", *VISION, "--plan", out_file, "--workers", "1", "--steps", "2")
    assert (code, err) == (0, "")
    assert picture in out


@pytest.mark.parametrize("more", [(), ("--edge", "one_bit")], ids=str)
def test_what_cannot_be_cut_is_neither_planned_nor_simulated_as_if_it_could(armillary, tmp_path, more):
    machines(2).save(tmp_path / "two.json")
    asked = ("translation", "--small", "--schedule", "gpipe(micro_batches=2)", *more, "--topology", "two.json")
    for command in ("plan", "simulate"):
        code, out, err = armillary(command, *asked, *(("--workers", "2") if command == "simulate" else ()))
        assert (code, out) == (2 if command == "simulate" else 1, ""), (out, err)
        assert "the plan counts target.weight in stage 0, the model reads it in stage 1" in err
    words = ("verify", *asked[:2], *asked[2:-2])
    told = "".join(one.reason for one in command_in_job(2, *words, folder=tmp_path))
    assert re.search(r"the plan counts target.weight in stage 0", err)[0] in told
    assert armillary("simulate", *VISION, *asked[2:], "--workers", "2")[0] == 0


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("pipeline", "cyclic_pipeline"),
        ("ring", "cyclic"),
        ("zero_ring", "cyclic"),
        ("gpipe", "gpipe"),
        ("one_f_one_b(micro_batches=8)", "one_f_one_b"),
    ],
)
def test_plan_draws_for_machines_that_are_not_here(armillary, tmp_path, schedule, name):
    link = Link(1e-4, 1e8)
    Topology(4, 1, link, link, 1 << 33).save(tmp_path / "four.json")
    code, out, err = armillary("plan", *VISION, "--schedule", schedule, "--topology", "four.json")
    assert (code, err) == (0, "")
    out = out.replace("\n  ", " ")
    assert parse(out[out.index(f"{name}: 4 workers, 4 stages") :]).workers == 4


def test_what_a_plan_prints_as_its_schedule_is_what_is_typed(armillary, tmp_path):
    asked = "pipeline(micro_batches=3, slack=3, clip_norm=0.5)"
    link = Link(1e-4, 1e8)
    Topology(2, 1, link, link, 1 << 33).save(tmp_path / "two.json")
    code, out, _ = armillary("plan", *VISION, "--schedule", asked, "--topology", "two.json", "--out", "plan.json")
    said = out[out.index("\nschedule ") + len("\nschedule ") : out.index("; mean over")]
    again = armillary("plan", *VISION, "--schedule", said, "--topology", "two.json", "--out", "again.json")
    assert (code, again[0]) == (0, 0)
    first, second = (Plan.load(tmp_path / name) for name in ("plan.json", "again.json"))
    assert first.schedule == second.schedule and options_of(first) == options_of(second)


def all_equal(out, plan):
    """Whether the row of that plan says that every tensor, many of them, has the same bits."""
    (row,) = [line for line in out.splitlines() if line.startswith(plan)]
    equal, _, count, largest = row.split()[-4:]
    return equal == count and int(count) > 20 and largest == "0.0e+00"


def test_verify_compares_every_tensor_with_the_reference_of_the_same_schedule(armillary):
    code, out, _ = armillary("verify", "vision", *VISION[2:], *on_one(), "--steps", "3")
    assert code == 0
    assert all_equal(out, "one_device, slack 0, 3 micro-batches, 3 stages")


def test_clipping_is_printed_and_verified(armillary):
    code, out, _ = armillary("plan", *VISION, *on_one("slack=1", "clip_norm=0.1"))
    assert code == 0 and "gradients are clipped to a norm of at most 0.1 over all stages" in out
    code, out, _ = armillary("verify", "vision", *VISION[2:], *on_one("slack=1", "clip_norm=0.1"), "--steps", "3")
    assert code == 0 and "clipped at 0.1 by global" in out
    code, out, _ = armillary("plan", *VISION, *on_one("clip_norm=0.1", "clip_by=previous"))
    assert code == 0 and "NOT exact: gradients are clipped by the norm over all stages of the step before" in out


def test_train_carries_the_schedule_out_and_resumes_with_another_number_of_micro_batches(armillary, tmp_path):
    code, out, err = armillary("train", *VISION, *on_one(), "--steps", "6", "--name", "mine")
    assert (code, err) == (0, "")
    assert out.index("worker 0, micro-batch 0: F0 F1 F2 B2 B1 B0") < out.index("saved step 6")
    other = ("--schedule", "one_device(micro_batches=2)", "--workers", "1")
    code, out, err = armillary("train", *VISION, *other, "--steps", "8", "--name", "mine", "--resume", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["steps"] == 8
    assert Plan.load(tmp_path / "runs" / "mine" / "plan.json").schedule.options["micro_batches"] == 2


def test_corrections_are_named_in_the_plan_and_held_to_their_own_reference(armillary):
    corrections = on_one("slack=3", "corrections=[weight_prediction, stable_rate]")
    code, out, err = armillary("plan", *VISION, *corrections)
    assert (code, err) == (0, "")
    assert "note: correction: weight_prediction: " in out and "note: correction: stable_rate: " in out
    code, out, _ = armillary("verify", "vision", *VISION[2:], *corrections, "--steps", "3")
    assert code == 0 and "weight_prediction and" in out and "stable_rate" in out


def test_a_delayed_all_reduce_is_planned_verified_and_trained(armillary, tmp_path):
    late = ("--schedule", "delayed_all_reduce", "--workers", "1")
    code, out, err = armillary("plan", *VISION, *late)
    assert (code, err) == (0, "")
    assert "delayed_all_reduce: 1 worker, 1 stage" in out and "NOT exact: every gradient" in out
    code, out, _ = armillary("verify", "vision", *VISION[2:], *late, "--steps", "3")
    assert code == 0
    assert all_equal(out, "delayed_all_reduce")
    code, out, err = armillary("train", *VISION, *late, "--steps", "2", "--name", "late", "--json")
    assert (code, err, json.loads(out)["steps"]) == (0, "", 2)
    assert Plan.load(tmp_path / "runs" / "late" / "plan.json").schedule.name == "delayed_all_reduce"


def test_accumulation_is_exact_planned_verified_and_trained(armillary):
    parts = ("--schedule", "accumulation(micro_batches=3)", "--workers", "1")
    code, out, _ = armillary("plan", *VISION, *parts)
    assert code == 0 and "exact (as in one process): all groups" in out and "NOT exact" not in out
    code, out, _ = armillary("verify", "vision", *VISION[2:], *parts, "--steps", "3")
    assert code == 0 and all_equal(out, "accumulation")
    code, out, err = armillary("train", *VISION, *parts, "--steps", "2", "--json")
    assert (code, err, json.loads(out)["steps"]) == (0, "", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schedule", "delayed_all_reduce(slack=1)"), "delayed_all_reduce has no slack; it may have bucket_bytes"),
        (("--schedule", "simultaneous(slack=1)"), "simultaneous has no slack; it may have no options"),
        (("--schedule", "delayed_all_reduce(clip_norm=0)"), "clip wants a positive norm"),
        (("--schedule", "one_device(micro_batches=2, clip_norm=1)"), "(slack=1 is enough)"),
        (("--schedule", "one_device(clip_norm=0)"), "clip wants a positive norm"),
        (("--schedule", "one_device(clip_norm=1, clip_by=all)"), "one of global, stage, previous"),
        (("--schedule", "one_device(clip_by=stage)"), "clip_by=stage wants a clip_norm"),
        (
            ("--schedule", "spiral"),
            "no schedule 'spiral'; there are accumulation, asynchronous, delayed_all_",
        ),
        (("--schedule", "pipline"), "did you mean 'pipeline'?"),
        (("--schedule", "ring(slack=1"), "is no NAME or NAME(OPTION=VALUE, ...): at its end, want ')'"),
        (("--schedule", "one_device(slack=-1)"), "slack >= 0"),
        (
            ("--schedule", "one_device(corrections=[prayer])"),
            "no correction 'prayer'; there are error_feedback, nesterov",
        ),
        (("--schedule", "ring(corrections=[stable_rate])"), "ring has no corrections"),
        (("--schedule", "one_device(stages=99)"), "modules make no 99 stages"),
        (("--schedule", "one_device(points=[nowhere])"), "cannot cut at nowhere"),
        (("--schedule", "one_device", "--lazy", "5.weight"), "since schedule one_device keeps tables whole"),
        (("--schedule", "delayed_all_reduce", "--lazy", "5.weight"), "lazy have no effect"),
    ],
)
def test_options_that_make_no_schedule_are_refused_in_one_line(armillary, options, message):
    code, out, err = armillary("plan", *VISION, "--workers", "1", *options)
    assert code in (1, 2) and out == ""
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "plan", "verify", "simulate"])
def test_help_names_every_schedule_and_what_it_may_be_asked(armillary, command):
    _, out, _ = armillary(command, "--help")
    said = " ".join(out.replace("│", " ").split())
    for word in (*SCHEDULES.all(), *{option for method in SCHEDULES.all().values() for option in method.options.knows}):
        assert word in said, word


def test_shared_stages_are_planned_for_devices_that_are_not_here_and_other_numbers_are_refused(armillary, tmp_path):
    link = Link(1e-4, 1e8)
    Topology(6, 1, link, link, 1 << 33).save(tmp_path / "six.json")
    code, out, err = armillary("plan", *VISION, "--schedule", "shared_stages", "--topology", "six.json")
    assert (code, err) == (0, "")
    assert (
        str(SharedPlacement(cyclic(3))) in out.replace("\n  ", " ")
        and "6 devices for 3 workers" in out
        and "a pipeline reaches" in out
    )
    Topology(4, 1, link, link, 1 << 33).save(tmp_path / "four.json")
    code, out, err = armillary("plan", *VISION, "--schedule", "shared_stages", "--topology", "four.json")
    assert code == 2 and "wants N(N+1)/2 processes for N workers (1, 3, 6, 10, ...), got 4; take 3 or 6" in err


@pytest.mark.parametrize(("workers", "text"), [("2", "zero_ring(stages=2)"), ("3", "shared_stages")])
def test_simulate_plays_stages_on_several_ranks(armillary, workers, text):
    code, out, err = armillary("simulate", *VISION, "--workers", workers, "--schedule", text)
    assert (code, err) == (0, "") and "step" in out
