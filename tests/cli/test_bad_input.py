"""Bad input on the command line: one clear message, exit code 2 before anything is done, else 1; nothing lost. One
worker, in this process."""

import dataclasses
import gzip
import json

import pytest
import torch

import face
from armillary.checkpoint.folder import latest_checkpoint
from armillary.cli import launch as workers
from armillary.cli.launch import Failure
from armillary.cli.names import built_in, find
from armillary.plans import Mesh, Plan

VISION = ("vision", "--small", "--workers", "1")
LANGUAGE_MODEL = ("language_model", "--small", "--workers", "1")


def test_an_unknown_workload_is_answered_with_those_there_are(refused):
    message = refused("train", "langauge_model", "--workers", "1")
    assert "no workload 'langauge_model'" in message
    assert "language_model, recommender, translation, vision" in message


def test_an_unknown_option_is_answered_with_those_that_can_be_set(refused):
    message = refused("train", "recommender", "--set", "widht=3")
    assert "did you mean 'width'?" in message and "batch_size" in message and "baseline_name" not in message
    assert "baseline_name" in refused("train", "recommender", "--set", "baseline_name=mine")


def test_what_a_file_lacks_is_said_in_words(refused, tmp_path):
    for text, said in (
        ("{}", "mine.json is no profile file: it lacks 'fingerprint'"),
        ("no", "mine.json is no profile file: it is no JSON ("),
    ):
        (tmp_path / "mine.json").write_text(text)
        face.machines(1).save(tmp_path / "one.json")
        message = refused("plan", "recommender", "--small", "--profile", "mine.json", "--topology", "one.json")
        assert said in message and "Error" not in message


def test_what_is_built_in_can_be_found():
    assert built_in() == ("language_model", "recommender", "translation", "vision")
    assert find("recommender", {"data": "latent_factors"}).name == "recommender"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (None, "no file mine.py"),
        ("x = 1\n", "has no function workload"),
        ("def workload(**options):\n    return object()\n", "lacks model(), optimizer(), batches(), loss()"),
    ],
)
def test_a_workload_file_that_is_none_is_told_what_is_missing(refused, tmp_path, source, complaint):
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    assert complaint in refused("train", "mine.py", "--workers", "1")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--set", "widht=3"), "has no option 'widht'; did you mean 'width'? It has corpus"),
        (("--set", "width"), "--set: want NAME=VALUE, got 'width'"),
        (
            ("--exchange", "owned_row=output"),
            "which is no layout and no exchange; there are replicated, ",
        ),
    ],
)
def test_a_wish_that_cannot_be_granted_says_why(refused, tmp_path, arguments, complaint):
    assert complaint in refused("train", *LANGUAGE_MODEL, *arguments)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").rglob("metrics.jsonl"))


def test_a_wish_that_the_model_cannot_grant_says_why(refused):
    message = refused("train", *LANGUAGE_MODEL, "--exchange", "owned_rows=lstm.*", expected=1)
    assert "lstm.weight_ih_l0: it is read whole by" in message


@pytest.mark.parametrize("command", ["train", "plan", "verify"])
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("langauge_model",), "no workload 'langauge_model'; did you mean 'language_model'? There are"),
        (("nowhere.py",), "no file nowhere.py"),
        ((*LANGUAGE_MODEL[:2], "--set", "width=0"), "width is 0"),
        (
            (*LANGUAGE_MODEL[:2], "--exchange", "teleport=output"),
            "'teleport', which is no layout and no exchange",
        ),
        ((*LANGUAGE_MODEL[:2], "--exchange", "owned_rows"), "--exchange: want CHOICE=PATTERN"),
        ((*LANGUAGE_MODEL[:2], "--exchange", "*=quantize(bits=8)"), "--exchange: want CHOICE=PATTERN"),
        ((*LANGUAGE_MODEL[:2], "--exchange", "quantize(bits=8)"), "--exchange: want CHOICE=PATTERN"),
        ((*LANGUAGE_MODEL[:2], "--schedule", "pipline"), "did you mean 'pipeline'?"),
        ((*LANGUAGE_MODEL[:2], "--schedule", "ring(slak=1)"), "ring has no slak"),
        ((*LANGUAGE_MODEL[:2], "--rule", "paralax"), "no rule 'paralax'; there are price, parallax; did you mean 'par"),
        ((*LANGUAGE_MODEL[:2], "--rule", "parallax", "--schedule", "ring"), "so schedule ring cannot be honoured"),
        ((*LANGUAGE_MODEL[:2], "--topology", "none.json"), "none.json is no topology file"),
        (
            (*LANGUAGE_MODEL[:2], "--replicate", "emb"),
            "'emb' names no parameter of the model; did you mean 'embedding.",
        ),
        ((*LANGUAGE_MODEL[:2], "--lazy", "outputs"), "'outputs' names no parameter of the model; did you mean 'output"),
    ],
)
def test_what_needs_no_worker_is_refused_before_any_is_started(refused, monkeypatch, command, arguments, complaint):
    monkeypatch.setattr(workers, "launch", lambda *_: pytest.fail("workers were started"))
    if command != "plan" or "--topology" not in arguments:  # plan starts none there
        arguments = (*arguments, "--workers", "2")
    assert complaint in refused(command, *arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--plan", "none.json"), "none.json is no plan file: there is none of that name"),
        (("--resume",), "nothing to resume: no folder language_model under runs"),
        (("--runs", "file"), "cannot write to file/language_model: file is no folder"),
        (("--steps", "0"), "--steps: want at least 1, got 0"),
    ],
)
def test_what_a_run_lacks_is_refused_before_workers_are_started(refused, monkeypatch, tmp_path, arguments, complaint):
    monkeypatch.setattr(workers, "launch", lambda *_: pytest.fail("workers were started"))
    (tmp_path / "file").write_text("")
    assert complaint in refused("train", "language_model", "--small", "--workers", "2", *arguments)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_workers_are_counted_from_one(refused):
    assert "--workers: want at least 1, got 0" in refused("train", "language_model", "--workers", "0")


@pytest.mark.parametrize("schedule", ["asynchronous", "ring"])
def test_one_batch_of_all_workers_is_no_step_of_a_schedule_that_owns_the_loop(refused, schedule):
    said = refused("verify", *LANGUAGE_MODEL, "--schedule", schedule, "--one-batch")
    assert f"--one-batch: no step of schedule {schedule} is one on the batch of all workers; drop it" in said


def corpus_missing(path):
    return "does not exist"


def corpus_empty(path):
    path.write_text("")
    return "is empty"


def corpus_binary(path):
    path.write_bytes(bytes(range(256)) * 40)
    return "holds no text but binary data"


def corpus_false_gzip(path):
    path.write_text("not compressed")
    return "is not the gzip file its name says"


def corpus_folder(path):
    path.mkdir()
    return "is a folder without files"


@pytest.mark.parametrize("spoil", [corpus_missing, corpus_empty, corpus_binary, corpus_false_gzip, corpus_folder])
def test_a_corpus_that_is_no_text_is_refused(refused, tmp_path, spoil):
    path = tmp_path / ("text.gz" if spoil is corpus_false_gzip else "text")
    complaint = spoil(path)
    assert complaint in refused("train", "language_model", "--workers", "1", "--corpus", path)


def test_a_corpus_of_ones_own_is_trained_on(armillary, tmp_path):
    text = "\n".join(f"line {number % 7} says that {number % 5} is more than {number % 3}" for number in range(900))
    (tmp_path / "text.gz").write_bytes(gzip.compress(text.encode()))
    code, out, err = armillary(
        "train", *LANGUAGE_MODEL, "--corpus", "text.gz", "--steps", "30", "--json", "--set", "learning_rate=0.3"
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["folder"] == "runs/language_model"
    assert told["metrics"]["perplexity"] < 60
    assert set(told["baseline"]) == set(told["metrics"])


def test_a_folder_that_cannot_be_written_is_refused(refused, tmp_path):
    (tmp_path / "runs").write_text("")
    assert "cannot write to runs/language_model: " in refused("train", *LANGUAGE_MODEL)


def test_a_run_is_not_written_over_and_its_plan_can_be_edited_and_run_again(armillary, refused, tmp_path):
    quick = (*LANGUAGE_MODEL, "--steps", "2", "--json")
    assert armillary("train", *quick, "--name", "one")[0] == 0
    kept = {path: path.read_bytes() for path in (tmp_path / "runs" / "one").rglob("*") if path.is_file()}
    assert "runs/one already holds a run" in refused("train", *quick, "--name", "one")
    assert {path: path.read_bytes() for path in kept} == kept
    plan = Plan.load(tmp_path / "runs/one/plan.json")
    renamed = dataclasses.replace(plan, groups=(dataclasses.replace(plan.groups[0], name="edited"), *plan.groups[1:]))
    renamed.save("edited.json")
    assert armillary("train", *quick, "--name", "two", "--plan", "edited.json")[0] == 0
    assert Plan.load(tmp_path / "runs/two/plan.json").groups[0].name == "edited"
    other = ("recommender", "--small", "--workers", "1", "--steps", "1", "--plan", "edited.json")
    assert "the plan was made for another model" in refused("train", *other, expected=1)
    dataclasses.replace(plan, mesh=Mesh.of(data=3)).save("three.json")
    assert "the plan is for 3 workers, this job has 1" in refused("train", *quick, "--plan", "three.json")


def test_a_run_that_had_come_to_its_end_is_left_as_it_was(armillary, tmp_path):
    asked = ("train", "recommender", "--small", "--workers", "1", "--steps", "3")
    assert armillary(*asked)[0] == 0
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, out, err = armillary(*asked, "--resume", "--exchange", "all_reduce=*")
    assert (code, err) == (0, "")
    assert "step 3 was reached before: nothing is left to do, and runs/recommender stays as it was" in out
    code, out, err = armillary(*asked[:-1], "2", "--resume", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"workload": "recommender", "folder": "runs/recommender", "steps": 3}
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == kept
    assert armillary("compare", "runs/recommender")[0] in (0, 3)


def rates_of_last_checkpoint(run):
    saved = torch.load(latest_checkpoint(run / "checkpoints") / "rest.pt", weights_only=True)
    return [group["lr"] for group in saved["optimizer"]["param_groups"]]


@pytest.mark.parametrize("schedule", ["simultaneous", "one_device"])
def test_a_learning_rate_that_is_given_anew_wins_over_the_saved_one(armillary, tmp_path, schedule):
    asked = ("train", *VISION, "--schedule", schedule, "--steps")
    assert armillary(*asked, "2", "--set", "learning_rate=0.1")[0] == 0
    code, out, err = armillary(*asked, "4", "--set", "learning_rate=0.05", "--resume")
    assert code == 0, err
    assert "/step-00000002; lr is 0.05 as asked now, no longer 0.1" in " ".join(out.split())
    assert rates_of_last_checkpoint(tmp_path / "runs/vision") == [0.05]
    code, out, err = armillary(*asked, "6", "--resume")  # no option is given anew
    assert code == 0 and "as asked now" not in out, err
    assert rates_of_last_checkpoint(tmp_path / "runs/vision") == [0.05]


def test_a_plan_that_was_written_is_played_and_one_without_its_facts_says_how_they_come_beside_it(
    armillary, refused, tmp_path
):
    code, out, err = armillary("plan", *VISION, "--out", "alone.json")
    assert code == 0, err
    assert "written: alone.json, alone.profile.json, alone.topology.json" in " ".join(out.split())
    code, out, err = armillary("simulate", "alone.json", "--out", "drawn", "--json")
    made = Plan.load(tmp_path / "alone.json")
    assert (code, err) == (0, "") and json.loads(out)["step_seconds"] == pytest.approx(made.step_seconds)
    (tmp_path / "alone.topology.json").unlink()
    message = refused("simulate", "alone.json")
    assert "played with its topology, and no alone.topology.json or topology.json stands beside alone.json" in message
    assert "armillary plan WORKLOAD --out alone.json writes it, or pass --topology FILE" in message


def test_a_plan_printed_as_json_is_played_with_what_stands_beside_it_there(armillary, tmp_path):
    _, out, _ = armillary("plan", *VISION, "--json")
    (tmp_path / "whole.json").write_text(out)
    code, played, err = armillary("simulate", "whole.json", "--out", "drawn", "--json")
    expected = json.loads(out)["plan"]["step_seconds"]
    assert (code, err) == (0, "") and json.loads(played)["step_seconds"] == pytest.approx(expected)


def test_true_and_false_are_booleans_of_an_option(armillary, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def workload(wide=None, deep=None):\n    raise ValueError(f'{wide!r} {deep!r}')\n"
    )
    code, _, err = armillary("train", "mine.py", "--workers", "1", "--set", "wide=true", "--set", "deep=false")
    assert code != 0 and "True False" in err


def test_two_runs_that_start_at_once_have_a_folder_each_and_leave_none_if_they_never_begin(
    armillary, monkeypatch, tmp_path
):
    asked, seen = ("train", "recommender", "--small", "--workers", "2"), []

    def launch(arguments, _):
        seen.append((arguments[-2:], sorted(path.name for path in (tmp_path / "runs").iterdir())))
        if len(seen) == 1:
            assert armillary(*asked)[0] == 1
        return Failure(0, 0.0, "it fails before it begins")

    monkeypatch.setattr(workers, "launch", launch)
    assert armillary(*asked)[0] == 1
    both = ["recommender", "recommender-2"]
    assert seen == [(["--name", both[0]], both[:1]), (["--name", both[1]], both)]
    assert not (tmp_path / "runs").exists()
    armillary("plan", "recommender", "--small", "--workers", "1", "--out", "plan.json")
    code, _, err = armillary("train", *LANGUAGE_MODEL, "--plan", "plan.json")
    assert code == 1 and "another model" in err
    assert not (tmp_path / "runs").exists()


def interrupted(*_):
    raise KeyboardInterrupt


def test_ctrl_c_speaks_of_the_folder_of_this_run_and_of_none_before_there_is_one(armillary, monkeypatch):
    asked = ("train", "recommender", "--small", "--workers", "1", "--steps", "1")
    for _ in range(2):
        assert armillary(*asked)[0] == 0
    monkeypatch.setattr("armillary.cli.train.train", interrupted)
    code, _, err = armillary(*asked)
    assert (code, err.strip()) == (130, "stopped; all workers are gone. No checkpoint was written yet.")
    code, _, err = armillary(*asked, "--resume")
    assert code == 130 and "The last checkpoint is runs/recommender-2/checkpoints/step-00000001; go on with" in err
    assert err.strip().endswith("--name recommender-2")
    monkeypatch.setattr("armillary.cli.train.workload_of", interrupted)
    code, _, err = armillary(*asked)
    assert (code, err.strip()) == (130, "stopped; all workers are gone.")


def test_ids_out_of_range_name_the_table_and_the_row(refused, tmp_path):
    source = """
from armillary.workloads.language_model import LanguageModel, SMALL


class TooLarge(LanguageModel):
    def batches(self, split, worker, workers, seed):
        for words, targets, negatives in super().batches(split, worker, workers, seed):
            yield words + 60, targets, negatives


def workload(**options):
    return TooLarge(**options)
"""
    (tmp_path / "large.py").write_text(source)
    said = refused("plan", "large.py", "--small", "--workers", "1", expected=1)
    assert "embedding.weight" in said and "60" in said


def test_a_plan_can_be_made_for_machines_one_does_not_have(armillary, tmp_path):
    topology = {
        "format": 2, "nodes": 4, "workers_per_node": 2, "memory_bytes": 1 << 30, "backend": "gloo",
        "inside": {"latency_seconds": 1e-5, "bytes_per_second": 1e10},
        "between": {"latency_seconds": 1e-4, "bytes_per_second": 1e7},
    }  # fmt: skip
    (tmp_path / "cluster.json").write_text(json.dumps(topology))
    code, out, err = armillary("plan", "language_model", "--small", "--topology", "cluster.json", "--out", "plan.json")
    assert code == 0, err
    assert "plan for 8 workers, 2 a node" in out
    assert Plan.load(tmp_path / "plan.json").workers == 8


def test_a_plan_is_written_into_a_folder_that_is_made_for_it_and_not_onto_one(armillary, refused, tmp_path):
    face.machines(2).save(tmp_path / "two.json")
    asked = ("plan", "recommender", "--small", "--topology", "two.json", "--out")
    assert "--out: . is a folder; pass the path of a file, as in plan.json" in refused(*asked, ".")
    code, _, err = armillary(*asked, "new/folder/plan.json")
    assert code == 0, err
    assert Plan.load(tmp_path / "new/folder/plan.json").workers == 2


def test_verify_prints_one_object_when_asked_to(armillary):
    code, out, err = armillary("verify", "vision", "--workers", "1", "--steps", "1", "--json")
    assert (code, json.loads(out)["is_equal"]) == (0, True), err


def test_verify_prints_a_line_for_each_plan_whatever_many_parameters_there_are(armillary):
    code, out, err = armillary("verify", "recommender", "--workers", "1", "--steps", "2")
    assert code == 0, err
    table = out[out.index("plan ") :].split("\n\n")[0].splitlines()
    plans = {line.split("  ")[0] for line in table[2:]}
    assert len(table) - 2 == len(plans) > 1, out
    assert out.count("0.0e+00") == 1 + len(plans), out  # in the first sentence, too


def test_help_names_units_and_defaults(armillary):
    code, out, _ = armillary("train", "--help")
    said = " ".join(out.replace("│", " ").split())
    assert code == 0
    for words in ("worker processes", "Save a checkpoint every S seconds", "default: 60", "optimizer steps"):
        assert words in said, words
    panels = [said.index(f"─ {panel} ─") for panel in ("Workload", "Plan", "Schedule", "Run", "Output")]
    assert panels == sorted(panels)


def test_what_plan_prints_as_json_is_a_plan_a_topology_and_a_profile(armillary, tmp_path):
    code, out, err = armillary("plan", *LANGUAGE_MODEL, "--json")
    assert code == 0, err
    (tmp_path / "printed.json").write_text(out)
    quick = ("train", *LANGUAGE_MODEL, "--steps", "1", "--json")
    assert armillary(*quick, "--plan", "printed.json")[0] == 0
    made = Plan.load(tmp_path / "runs/language_model/plan.json")
    assert json.loads(made.to_json()) == json.loads(out)["plan"]
    files = ("--topology", "printed.json", "--profile", "printed.json")
    code, again, err = armillary("plan", *LANGUAGE_MODEL[:2], *files, "--json")
    assert code == 0, err
    assert json.loads(again)["plan"] == json.loads(out)["plan"]


def test_a_run_that_is_refused_by_its_plan_leaves_no_folder(refused, tmp_path):
    message = refused("train", *LANGUAGE_MODEL, "--exchange", "owned_rows=lstm.weight_ih_l0", expected=1)
    assert "lstm.weight_ih_l0" in message and not (tmp_path / "runs").exists()
    (tmp_path / "runs").mkdir()
    refused("train", *LANGUAGE_MODEL, "--exchange", "owned_rows=lstm.weight_ih_l0", expected=1)
    assert not [*(tmp_path / "runs").iterdir()]
