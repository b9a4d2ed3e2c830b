"""The command as a user runs it: its own worker processes, Ctrl-C, a failing rank, an outer torchrun.

Workers are always started whole. So is the command, where Ctrl-C or an outer torchrun meet it; else it is forked.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from armillary.checkpoint.folder import latest_checkpoint
from armillary.cli import launch as launcher
from armillary.cli.launch import Failure, first_failure, keep_failure, launch
from armillary.cli.main import app
from face import machines
from forked import command, forkserver

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_workload.py"
LONGEST_SECONDS = 100
NOT_SET = "note: compared to 1e-10 instead of every bit: MKL_CBWR was not set"

pytestmark = pytest.mark.timeout(3 * LONGEST_SECONDS)  # each starts several processes on a machine that may be busy

FAULTY = f"""
import importlib.util
import math
import sys
from torch.distributed import get_rank

spec = importlib.util.spec_from_file_location("inner", {str(EXAMPLE)!r})
inner = importlib.util.module_from_spec(spec)
sys.modules["inner"] = inner
spec.loader.exec_module(inner)
SMALL = inner.SMALL
weights_seen = []


class Faulty(inner.NextLetter):
    def loss(self, model, batch):
        weight = float(list(model.parameters())[-1].detach().double().sum())
        if weights_seen[-1:] != [weight]:  # a step was taken; profiling takes none
            weights_seen.append(weight)
        return super().loss(model, batch) * (math.nan if get_rank() == 1 and len(weights_seen) == 8 else 1)


def workload(**options):
    return Faulty(**options)
"""


def start(folder, *arguments, launcher=("-m", "armillary.cli"), environment=None):
    program = [sys.executable, *launcher, *map(str, arguments)]
    ends = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(program, cwd=folder, env=environment, text=True, start_new_session=True, **ends)


def finish(process):
    out, err = process.communicate(timeout=LONGEST_SECONDS)
    return process.returncode, out, err


def unmeasured(folder):
    """The option that names the machines, in a file: what does not measure them is sooner at what it is to show."""
    machines(2).save(folder / "two.json")
    return "--topology", "two.json"


def test_two_workers_train_and_print_one_object(tmp_path):
    ((code, out, err, _),) = command(("train", EXAMPLE, "--workers", 2, "--steps", 30, "--json"), tmp_path)
    assert code == 0, err
    told = json.loads(out)
    assert told["steps"] == 30
    assert told["metrics"]["accuracy"] > 0.2
    assert (tmp_path / told["folder"] / "plot.png").stat().st_size > 10_000
    assert latest_checkpoint(tmp_path / told["folder"] / "checkpoints").name == "step-00000030"


def test_a_run_one_of_whose_workers_was_killed_says_how_to_go_on(tmp_path):
    killed = FAULTY.replace(
        "return super()",
        "if get_rank() == 1 and len(weights_seen) == 8: os.kill(os.getpid(), 9)\n        return super()",
    )
    (tmp_path / "killed.py").write_text("import os\n" + killed)
    arguments = ("train", "killed.py", "--workers", 2, "--every-steps", 5, *unmeasured(tmp_path))
    ((code, _, err, _),) = command(arguments, tmp_path)
    assert code == 1
    first, second = err.splitlines()
    assert first == "error: rank 1: ended by signal 9; the machine may be out of memory"
    assert second.startswith(
        "The last checkpoint is runs/killed/checkpoints/step-00000005; go on with: armillary train"
    )
    assert second.endswith(" --resume --name killed")


def test_the_first_error_is_shown_once_with_its_rank_and_the_last_checkpoint(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    arguments = ("train", "faulty.py", "--workers", 2, "--every-steps", 5, *unmeasured(tmp_path))
    ((code, out, err, _),) = command(arguments, tmp_path)
    assert code == 1
    assert err.startswith("error: rank 1: the loss is nan at step 7; the last good checkpoint is runs/faulty/")
    assert err.count("\n") == 1
    assert "step-00000005" in err and "Traceback" not in out + err
    assert latest_checkpoint(tmp_path / "runs/faulty/checkpoints").name == "step-00000005"


def descendants(pid):
    """Process ids below `pid`, by /proc."""
    below = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        below.setdefault(parent, []).append(int(stat.parent.name))
    found, front = [], [pid]
    while front:
        front = [child for parent in front for child in below.get(parent, [])]
        found += front
    return found


@pytest.mark.filterwarnings("ignore:checkpoint. skipped")  # the save that Ctrl-C may have cut short
def test_ctrl_c_says_one_thing_leaves_no_worker_and_a_good_checkpoint(tmp_path, monkeypatch):
    arguments = ("train", EXAMPLE, "--workers", 2, "--steps", 1_000_000, "--every-steps", 20, "--name", "long")
    process = start(tmp_path, *arguments, *unmeasured(tmp_path))
    checkpoints, until = tmp_path / "runs/long/checkpoints", time.monotonic() + LONGEST_SECONDS
    while not list(checkpoints.glob("step-*/*")) and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(0.5)
    workers = descendants(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130
    assert err.strip().startswith("stopped; all workers are gone. The last checkpoint is runs/long/checkpoints/step-")
    assert err.strip().count("\n") == 0
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    good = latest_checkpoint(checkpoints)
    assert good is not None and good.name in err
    monkeypatch.chdir(tmp_path)
    typed = [str(one) for one in (*arguments, *unmeasured(tmp_path))]
    assert shlex.split(err.strip().rpartition("go on with: ")[2]) == ["armillary", *typed, "--resume"]
    again = ("train", str(EXAMPLE), "--workers", "1", "--name", "long", "--resume", "--steps", "10")
    done = CliRunner().invoke(app, again)
    assert done.exit_code == 0, done.stderr
    assert f"going on after step {int(good.name.removeprefix('step-'))}" in done.stdout


def test_it_runs_the_same_under_an_outer_torchrun_and_a_false_claim_ends_with_one(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable)
    module = ("-m", "armillary.cli", "verify", "vision", "--set", "norm='batch'", "--steps", "2", "--one-batch")
    code, out, _ = finish(start(tmp_path, *module, *unmeasured(tmp_path), launcher=launcher))
    assert code == 1
    assert "vision: 2 workers on 1 node and one process are NOT equal" in out
    assert out.count("NOT equal") == 1


RING = ("verify", "vision", "--schedule", "ring", "--steps", "2")


def test_verify_sets_the_mode_in_which_every_bit_can_be_claimed(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    asked = (*RING, "--workers", "2", *unmeasured(tmp_path))
    code, out, err = finish(start(tmp_path, *asked, environment=environment))
    assert code == 0, err
    assert "tolerance 0e+00" in out and NOT_SET not in out.replace("\n  ", " ")


def test_verify_says_so_where_the_user_unset_the_mode(tmp_path):
    ended, other = command(RING, tmp_path, ranks=2, MKL_CBWR="")
    assert (ended.code, other.code) == (0, 0), ended.err
    assert "tolerance 0e+00" not in ended.out and NOT_SET in ended.out.replace("\n  ", " ")


def write_error(folder, rank, seconds, text):
    path = folder / str(rank) / "error.json"
    path.parent.mkdir()
    message = {"message": text, "rank": rank, "extraInfo": {"timestamp": "0", "seconds": seconds}}
    path.write_text(json.dumps({"message": message}))


def test_of_several_errors_the_earliest_is_the_cause(tmp_path):
    write_error(tmp_path, 0, 20.0, "a peer has stopped")
    write_error(tmp_path, 1, 10.0, "the cause")
    assert first_failure(tmp_path, {0: 1, 1: 1}).text == "the cause"


@pytest.mark.parametrize(("number", "word"), [(9, "out of memory"), (11, "signal 11")])
def test_a_worker_that_was_killed_is_the_cause_whatever_the_others_say(tmp_path, number, word):
    write_error(tmp_path, 0, 20.0, "a peer has stopped")
    failure = first_failure(tmp_path, {0: 1, 1: -number})
    assert failure.rank == 1 and word in failure.text


def test_a_torn_error_file_hides_no_whole_one(tmp_path):
    write_error(tmp_path, 1, 20.0, "the cause")
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "error.json").write_text('{"message": {"mess')
    assert first_failure(tmp_path, {}) == Failure(1, 20.0, "the cause")
    (tmp_path / "1" / "error.json").unlink()
    left = first_failure(tmp_path, {})
    assert (left.rank, left.text) == (0, "ended; the message it left is not whole")


def test_what_a_worker_says_of_its_end_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def ended(draft, path):
        assert not file.exists() and json.loads(Path(draft).read_text())["message"]["message"] == "the cause"
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", ended)
        with pytest.raises(SystemExit):
            keep_failure("the cause", 1)
    assert not file.exists()  # the launcher ended this worker as it wrote
    keep_failure("the cause", 1)
    assert first_failure(tmp_path, {}).text == "the cause"


def test_a_worker_that_the_launcher_ended_does_not_hide_the_exit_code_of_another(tmp_path):
    assert first_failure(tmp_path, {0: -15, 1: 3}).text == "ended with exit code 3 and no message"
    write_error(tmp_path, 0, 10.0, "")  # its body has said what there is to say; it was ended before it could end
    write_error(tmp_path, 1, 20.0, "")
    assert first_failure(tmp_path, {0: -15, 1: 3}).code == 3
    assert first_failure(tmp_path, {1: 3}).code == 3
    assert first_failure(tmp_path, {0: -15}).code == 1


LEAVES_AN_EMPTY_FILE = """
import os
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").close()
os._exit(1)
"""


def launched(kept):
    launcher.WORKER = LEAVES_AN_EMPTY_FILE
    Path(kept).write_text(launch([], 2).text)


def test_the_launcher_survives_an_empty_error_file(tmp_path):
    process = forkserver().Process(target=launched, args=(str(tmp_path / "text"),))
    process.start()
    process.join(LONGEST_SECONDS)
    assert process.exitcode == 0
    assert (tmp_path / "text").read_text() == "ended; the message it left is not whole"
