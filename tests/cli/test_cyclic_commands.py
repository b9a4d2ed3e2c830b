"""Cyclic schedules on the command line: the picture before anything runs, equality bit for bit, clear refusals."""

import json

import pytest
from typer.testing import CliRunner

from armillary.cli.main import app
from armillary.cli.schedule_options import Scheduled
from armillary.facts.plan import Plan
from armillary.facts.topology import Link, Topology
from armillary.schedules.cyclic import cyclic
from armillary.schedules.cyclic_modes import RINGS
from armillary.schedules.schedule import parse
from armillary.schedules.shared import Sharing
from armillary.session.decide import Wishes

VISION = ("vision", "--small", "--set", "architecture=vit", "--set", "width=16", "--set", "depth=2")
CYCLIC = ("--schedule", "cyclic", "--mode", "one_device", "--workers", "3")


@pytest.fixture
def armillary(tmp_path, monkeypatch):
    """Runs the command in an empty folder; gives its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        return done.exit_code, done.stdout, done.stderr

    return run


def test_plan_prints_the_picture_of_the_schedule_below_the_table_and_that_it_is_not_exact(armillary, tmp_path):
    out_file = tmp_path / "plan.json"
    code, out, err = armillary("plan", *VISION, *CYCLIC, "--slack", "1", "--out", out_file)
    assert (code, err) == (0, "")
    made = Plan.load(out_file)
    assert parse(out[out.index("cyclic: 3 workers, 3 stages, 3 micro-batches") :]) == parse(made.picture)
    assert "NOT exact: 67% of the pairs" in out and "gradient accumulation" in out
    assert (made.workers, made.schedule.options["slack"]) == (1, 1)
    code, out, err = armillary("train", *VISION, "--plan", out_file, "--workers", "1", "--steps", "2")
    assert (code, err) == (0, "")
    assert made.picture in out


@pytest.mark.parametrize(("mode", "name"), [("pipeline", "cyclic_pipeline"), *((ring, "cyclic") for ring in RINGS)])
def test_plan_draws_for_machines_that_are_not_here(armillary, tmp_path, mode, name):
    link = Link(1e-4, 1e8)
    Topology(4, 1, link, link, 1 << 33).save(tmp_path / "four.json")
    options = ("--schedule", "cyclic", "--mode", mode, "--topology", "four.json", "--json")
    code, out, err = armillary("plan", *VISION, *options)
    assert (code, err) == (0, "")
    assert parse(json.loads(out)["plan"]["picture"]).workers == 4
    assert json.loads(out)["plan"]["picture"].startswith(f"{name}: 4 workers, 4 stages")


def test_verify_compares_every_tensor_with_the_reference_of_the_same_schedule(armillary):
    code, out, _ = armillary("verify", "vision", *VISION[2:], *CYCLIC, "--steps", "3")
    assert code == 0
    rows = [line for line in out.splitlines() if "one_device" in line]
    assert len(rows) > 20 and all(row.rstrip().endswith("equal") and "0.0e+00" in row for row in rows)
    assert "cyclic, slack 0, 3 micro-batches, 3 stages" in rows[0]


def test_clipping_is_printed_and_verified(armillary):
    clip = ("--slack", "1", "--clip", "0.1")
    code, out, _ = armillary("plan", *VISION, *CYCLIC, *clip)
    assert code == 0 and "gradients are clipped to a norm of at most 0.1 over all stages" in out
    code, out, _ = armillary("verify", "vision", *VISION[2:], *CYCLIC, *clip, "--steps", "3")
    assert code == 0 and "clipped at 0.1 by global" in out
    code, out, _ = armillary("plan", *VISION, *CYCLIC, "--clip", "0.1", "--clip-by", "previous")
    assert code == 0 and "NOT exact: gradients are clipped by the norm over all stages of the step before" in out


def test_train_carries_the_schedule_out_and_resumes_with_another_number_of_micro_batches(armillary, tmp_path):
    code, out, err = armillary("train", *VISION, *CYCLIC, "--steps", "6", "--name", "mine")
    assert (code, err) == (0, "")
    assert out.index("worker 0, micro-batch 0: F0 F1 F2 B2 B1 B0") < out.index("saved step 6")
    wider = [*CYCLIC[:-1], "2"]
    code, out, err = armillary("train", *VISION, *wider, "--steps", "8", "--name", "mine", "--resume", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["steps"] == 8
    assert Plan.load(tmp_path / "runs" / "mine" / "plan.json").schedule.options["micro_batches"] == 2


def test_remedies_are_named_in_the_plan_and_held_to_their_own_reference(armillary):
    remedies = ("--slack", "3", "--remedy", "weight_prediction", "--remedy", "stable_rate")
    code, out, err = armillary("plan", *VISION, *CYCLIC, *remedies)
    assert (code, err) == (0, "")
    assert "note: remedy: weight_prediction: " in out and "note: remedy: stable_rate: " in out
    code, out, _ = armillary("verify", "vision", *VISION[2:], *CYCLIC, *remedies, "--steps", "3")
    assert code == 0 and "3 stages, weight_prediction and stable_rate" in out


def test_a_delayed_all_reduce_is_planned_verified_and_trained(armillary, tmp_path):
    late = ("--schedule", "delayed_all_reduce", "--workers", "1")
    code, out, err = armillary("plan", *VISION, *late)
    assert (code, err) == (0, "")
    assert "delayed_all_reduce: 1 worker, 1 stage" in out and "NOT exact: every gradient" in out
    code, out, _ = armillary("verify", "vision", *VISION[2:], *late, "--steps", "3")
    assert code == 0
    rows = [line for line in out.splitlines() if "all one step late" in line]
    assert len(rows) > 20 and all(row.rstrip().endswith("equal") and "0.0e+00" in row for row in rows)
    code, out, err = armillary("train", *VISION, *late, "--steps", "2", "--name", "late", "--json")
    assert (code, err, json.loads(out)["steps"]) == (0, "", 2)
    assert Plan.load(tmp_path / "runs" / "late" / "plan.json").schedule.name == "delayed_all_reduce"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--schedule", "delayed_all_reduce", "--slack", "1"),
            "delayed_all_reduce has no slack; add --schedule cyclic",
        ),
        (("--slack", "1"), "--schedule simultaneous has no slack; add --schedule cyclic"),
        (("--clip", "1"), "--schedule simultaneous has no clip_norm; add --schedule cyclic"),
        (("--schedule", "delayed_all_reduce", "--clip", "0"), "clip wants a positive norm"),
        ((*CYCLIC[:4], "--micro-batches", "2", "--clip", "1"), "(slack=1 is enough)"),
        ((*CYCLIC[:4], "--clip", "0"), "clip wants a positive norm"),
        ((*CYCLIC[:4], "--clip", "1", "--clip-by", "all"), "one of global, stage, previous"),
        ((*CYCLIC[:4], "--clip-by", "stage"), "clip_by=stage wants a clip_norm"),
        (("--schedule", "spiral"), "there are simultaneous, cyclic, delayed_all_reduce"),
        ((*CYCLIC[:2], "--mode", "spiral"), "there are one_device, pipeline, ring, zero_ring"),
        ((*CYCLIC[:4], "--slack", "-1"), "slack >= 0"),
        ((*CYCLIC[:4], "--remedy", "prayer"), "no remedy 'prayer'; there are error_feedback, nesterov"),
        (("--schedule", "cyclic", "--mode", "ring", "--remedy", "stable_rate"), "has no stable_rate"),
        (("--remedy", "stable_rate"), "--schedule simultaneous has no remedies"),
        ((*CYCLIC[:4], "--stages", "99"), "modules make no 99 stages"),
        ((*CYCLIC[:4], "--cut", "nowhere"), "cannot cut at nowhere"),
        ((*CYCLIC[:4], "--lazy", "5.weight"), "can be lazy under a cyclic schedule only if kept by row"),
        (("--schedule", "delayed_all_reduce", "--lazy", "0.weight"), "lazy have no effect"),
    ],
)
def test_options_that_make_no_schedule_are_refused_in_one_line(armillary, options, message):
    code, out, err = armillary("plan", *VISION, "--workers", "1", *options)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["train", "plan", "verify"])
def test_help_names_every_option_of_a_schedule_with_its_default(armillary, command):
    _, out, _ = armillary(command, "--help")
    said = " ".join(out.replace("│", " ").split())
    options = ("--schedule", "--mode", "--slack", "--stages", "--micro-batches", "--cut", "--remedy", "--clip")
    for option in (*options, "--clip-by"):
        assert option in said
    assert "(default: ring)" in said and "NOT exact" in said


def test_mode_shared_is_planned_for_devices_that_are_not_here(armillary, tmp_path):
    link = Link(1e-4, 1e8)
    Topology(6, 1, link, link, 1 << 33).save(tmp_path / "six.json")
    options = ("--schedule", "cyclic", "--mode", "shared", "--topology", "six.json")
    code, out, err = armillary("plan", *VISION, *options)
    assert (code, err) == (0, "")
    assert str(Sharing(cyclic(3))) in out and "6 devices for 3 workers" in out and "mode pipeline reaches" in out
    code, out, err = armillary("train", *VISION, *options[:4], "--workers", "0", "--steps", "2")
    assert code == 1 and err == "error: --workers: want at least 1, got 0\n"


@pytest.mark.parametrize(("workers", "devices"), [(1, 1), (2, 3), (3, 6), (None, 3), (0, 0), (-2, -2)])
def test_mode_shared_starts_a_process_for_every_device_and_says_so(workers, devices, capsys):
    asked = Scheduled("cyclic", "shared", 0, None, None, [], [])
    assert asked.announced(workers) == devices
    said = f"mode shared: {workers or 2} workers share {devices} processes, one a device (N(N+1)/2)\n"
    assert capsys.readouterr().err == (said if devices > 0 else "")


def test_under_torchrun_mode_shared_takes_the_processes_there_are(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    asked = Scheduled("cyclic", "shared", 0, None, None, [], [])
    assert (asked.announced(None), asked.announced(2)) == (None, 3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("workers", "micro_batches", "processes", "each"),
    [(3, None, 1, 3), (None, 4, 1, 4), (2, 3, 2, 3)],
)
def test_micro_batches_of_one_device_leave_workers_to_be_processes(workers, micro_batches, processes, each):
    asked = Scheduled("cyclic", "one_device", 0, None, micro_batches, [], [])
    assert asked.processes(workers) == processes
    assert asked.added_to(Wishes(), workers).schedule.options["micro_batches"] == each
