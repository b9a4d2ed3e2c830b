"""The command line: exit codes, and the files it leaves.

Programs are forked from one process that has imported the library; `tests/cli/test_processes.py` starts some whole.
"""

import json
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
    for name, steps in (("whole", ("8",)), ("half", ("4", "8"))):
        for number, count in enumerate(steps):
            more = ("--resume",) if number else ()
            arguments = (*asked, "--steps", count, "--name", name, *more)
            ended = face.command_in_job(2, *arguments, folder=tmp_path)
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
