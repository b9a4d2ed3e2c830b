"""The command line: exit codes, the files it leaves, and one line for what is wrong.

Programs are forked from one process that has imported the library; `tests/cli/test_processes.py` starts some whole.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from plain_loop import same

import armillary
import face

MINE = Path(__file__).parents[2] / "examples" / "my_workload.py"
VIT = ("--set", "architecture=vit", "--set", "width=16", "--set", "depth=2")
VISION = ("vision", "--small", *VIT)
LEFT = {"plan.json", "profile.json", "metrics.jsonl", "trace.json", "plot.png", "checkpoints"}


def refused(folder, *arguments, expected=2):
    """What one process says, which must be one line, and nothing else be left."""
    before = sorted(folder.rglob("*"))
    ended = face.command(*arguments, folder=folder)
    assert (ended.code, ended.out) == (expected, ""), ended
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, ended.err
    assert sorted(folder.rglob("*")) == before
    return ended.err


def test_two_ranks_train_a_file_of_ones_own_and_leave_what_they_did(tmp_path):
    first, second = face.command_in_job(2, "train", MINE, "--steps", "20", "--json", folder=tmp_path)
    assert (first.code, second.code, second.out) == (0, 0, "") and first.err == second.err == ""
    told = json.loads(first.out)
    folder = tmp_path / told["folder"]
    assert told["steps"] == 20 and told["metrics"]["accuracy"] > 0.15
    assert {path.name for path in folder.iterdir()} >= LEFT
    assert armillary.Plan.load(folder / "plan.json").workers == 2
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert face.latest_checkpoint(folder / "checkpoints").name == "step-00000020"
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]  # as Perfetto opens it, with both ranks
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    a_group_whose_bytes_are_wrong_is_found(folder, tmp_path)


def a_group_whose_bytes_are_wrong_is_found(folder, where):
    """The bytes of a group that travels whole are known to the byte; a tenth more is planted in its forecast."""
    wide = ("compare", folder, "--sent", "0.02", "--memory", "1", "--seconds", "1", "--json")
    ended = {"as it was": face.command(*wide, folder=where)}
    plan = json.loads((folder / "plan.json").read_text())
    group = next(group for group in plan["groups"] if group["layout"] == "replicated")
    group["forecast"]["sent_bytes"] *= 1.1
    (folder / "plan.json").write_text(json.dumps(plan))
    ended["planted"] = face.command(*wide, folder=where)
    lines = {name: {line["group"]: line for line in json.loads(one.out)["lines"]} for name, one in ended.items()}
    assert lines["as it was"][group["name"]]["outside"] == []
    assert lines["planted"][group["name"]]["outside"] == ["sent_bytes"] and ended["planted"].code == 3


def checkpointed(folder):
    path = face.latest_checkpoint(folder / "checkpoints")
    return path.name, torch.load(path / "rest.pt", weights_only=True)["model"]


def test_a_run_that_goes_on_does_so_under_its_plan_and_profile_unless_another_is_asked_for(tmp_path):
    def train(steps, *more):
        asked = ("train", MINE, "--workers", "1", "--name", "one", "--steps", str(steps), *more)
        ended = face.command(*asked, folder=tmp_path)
        assert (ended.code, ended.err) == (0, ""), ended
        return [(tmp_path / "runs" / "one" / name).read_text() for name in ("plan.json", "profile.json")]

    first = train(2, "--exchange", "gather_rows=0.weight")
    assert "gather_rows" in first[0]
    assert train(4, "--resume") == first  # seconds of a second profile would be others
    plan, profile = train(6, "--resume", "--exchange", "all_reduce=*")
    assert "gather_rows" not in plan and profile != first[1]
    (tmp_path / "runs" / "one" / "profile.json").write_text("{}")  # nothing to go by: planned anew
    assert Path(tmp_path / "runs" / "one" / "plan.json").exists() and len(train(8, "--resume")[1]) > 2


@pytest.mark.parametrize("text", ["ring(stages=2)", "delayed_all_reduce"])
def test_a_schedule_is_trained_by_two_ranks_and_resumes_to_the_same_weights(tmp_path, text):
    saves = ("--every-steps", "4", "--every-seconds", "0")
    asked = ("train", *VISION, "--set", "batch_size=8", "--schedule", text, *saves, "--json")
    for name, more in (("whole", ()), ("half", ("--resume",))):
        if more:
            shutil.copytree(tmp_path / "runs/whole", tmp_path / "runs/half")
            shutil.rmtree(tmp_path / "runs/half/checkpoints/step-00000008")
        ended = face.command_in_job(2, *asked, "--steps", "8", "--name", name, *more, folder=tmp_path)
        assert [one.code for one in ended] == [0, 0], ended
    whole, half = (checkpointed(tmp_path / "runs" / name) for name in ("whole", "half"))
    assert whole[0] == "step-00000008" and same(whole, half)


def test_verify_ends_with_zero_where_ranks_and_one_process_agree_and_with_three_where_not(tmp_path):
    fair = face.command_in_job(2, "verify", MINE, "--steps", "2", "--json", folder=tmp_path)
    assert [one.code for one in fair] == [0, 0] and json.loads(fair[0].out)["is_equal"] is True
    assert json.loads(fair[0].out)["idle"] == [] and json.loads(fair[0].out)["acted"]
    false = ("verify", "vision", "--set", "norm='batch'", "--steps", "2", "--one-batch")
    ended = face.command_in_job(2, *false, folder=tmp_path)
    assert [one.code for one in ended] == [3, 3] and "NOT equal" in ended[0].out


@pytest.mark.parametrize("text", ["pipeline(slack=1)", "zero_ring"])
def test_verify_holds_a_schedule_to_its_reference_without_tolerance(tmp_path, text):
    ended = face.command_in_job(
        2, "verify", "vision", *VIT, "--schedule", text, "--steps", "3", "--json", folder=tmp_path
    )
    found = json.loads(ended[0].out)
    assert [one.code for one in ended] == [0, 0]
    assert found["is_equal"] is True and found["tolerance"] == 0.0
    assert max(one["difference"] for one in found["differences"]) == 0.0


def test_plans_are_made_for_machines_that_are_not_here_drawn_and_edited(tmp_path):
    face.machines(8, 4).save(tmp_path / "eight.json")
    asked = ("plan", MINE, "--topology", "eight.json", "--out", "plan.json")
    ended = face.command(*asked, folder=tmp_path)
    assert (ended.code, ended.err) == (0, "") and "8 workers" in ended.out
    plan = armillary.Plan.load(tmp_path / "plan.json")
    assert plan.workers == 8
    printed = json.loads(face.command(*asked, "--json", folder=tmp_path).out)
    assert [group["name"] for group in printed["plan"]["groups"]] == [group.name for group in plan.groups]
    face.machines(4, 2).save(tmp_path / "four.json")
    for text in ("ring", "pipeline(slack=1)", "zero_ring", "delayed_all_reduce"):
        said = face.command("plan", *VISION, "--topology", "four.json", "--schedule", text, folder=tmp_path)
        assert (said.code, said.err) == (0, "") and "4 workers" in said.out and "NOT exact" in said.out, text
        assert "staleness" in said.out, text  # who does what when is drawn


def test_measure_plan_simulate_and_compare_feed_one_another(tmp_path):
    def run(*arguments):
        ended = face.command(*arguments, folder=tmp_path)
        assert (ended.code, ended.err.count("error")) == (0, 0), ended
        return ended.out

    run("measure", MINE, "--workers", "1", "--out", "seen")
    files = ("--topology", "seen/topology.json", "--profile", "seen/profile.json")
    run("plan", MINE, *files, "--out", "seen/plan.json")
    told = json.loads(run("simulate", "seen/plan.json", "--json", "--out", "drawn"))
    assert told["workers"] == 1 and told["step_seconds"] > 0
    events = json.loads((tmp_path / "drawn" / "timeline.json").read_text())["traceEvents"]
    assert events
    run("train", MINE, "--workers", "1", "--steps", "3", "--name", "one")
    wide = run("compare", "runs/one", "--sent", "1", "--memory", "1", "--seconds", "1")
    assert "every figure is within its band" in wide
    narrow = face.command("compare", "runs/one", "--sent", "0", "--memory", "0", "--seconds", "0", folder=tmp_path)
    assert narrow.code == 3 and "outside their bands; the last column names them" in " ".join(narrow.out.split())


def test_what_is_wrong_with_a_command_is_said_in_one_line_and_nothing_is_left(tmp_path):
    one = ("--workers", "1")
    for arguments, said in [
        (("train", "langauge_model", *one), "no workload 'langauge_model'"),
        (("train", "nowhere.py", *one), "no file nowhere.py"),
        (("train", MINE, *one, "--set", "widht=3"), "widht"),
        (("train", MINE, *one, "--steps", "0"), "--steps: want at least 1, got 0"),
        (("train", MINE, *one, "--plan", "none.json"), "none.json is no plan file"),
        (("train", MINE, *one, "--resume"), "nothing to resume"),
        (("train", MINE, "--workers", "0"), "want at least 1, got 0"),
        (("plan", *VISION, *one, "--schedule", "spiral"), "spiral"),
        (("simulate", "none.json"), "none.json is no plan file"),
        (("compare", "nowhere"), "nowhere has no plan.json"),
        (("train", MINE, *one, "--replicate", "emb.*"), "'emb.*' names no parameter"),
        (("plan", MINE, *one, "--replicate", "weight"), "or '0.weight'?"),
    ]:
        assert said in refused(tmp_path, *arguments), arguments


FAULTY = f"""
import importlib.util, sys
from torch.distributed import get_rank

spec = importlib.util.spec_from_file_location("inner", {str(MINE)!r})
inner = importlib.util.module_from_spec(spec)
sys.modules["inner"] = inner
spec.loader.exec_module(inner)
SMALL = inner.SMALL


class Faulty(inner.NextLetter):
    def samples(self, batch):
        if get_rank() == 1:
            raise ValueError("the planted fault")
        return super().samples(batch)


def workload(**options):
    return Faulty(**options)
"""


def test_a_rank_that_fails_ends_with_one_and_says_why_whoever_launched_it(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    ended = face.command_in_job(2, "train", "faulty.py", "--steps", "8", folder=tmp_path)
    assert ended[1].code == 1 and "the planted fault" in ended[1].reason


def test_a_run_is_not_written_over_and_refuses_a_plan_for_others(tmp_path):
    quick = ("train", MINE, "--workers", "1", "--steps", "2", "--json")
    assert face.command(*quick, "--name", "one", folder=tmp_path).code == 0
    kept = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert "runs/one already holds a run" in refused(tmp_path, *quick, "--name", "one")
    assert {path: path.read_bytes() for path in kept} == kept
    said = refused(tmp_path, *quick, "--set", "width=8", "--plan", "runs/one/plan.json", expected=1)
    assert "other shapes or dtypes; plan again for this model" in said
