"""The page of lossy exchanges: steps to a metric times seconds a step, from cells that were kept; one trained here."""

import json

import pytest
from benchmarks.lossy import run
from benchmarks.lossy.contenders import OURS, PEERS, START, same_training
from benchmarks.lossy.report import page, reached_at, seconds_to
from benchmarks.lossy.tasks import TASKS
from benchmarks.lossy.trajectory import Curve, to_the_end, trajectory

ENDS = {"exact": 0.9, "int8": 0.89, "ddp_fp16_25mb": 0.9, "ddp_powersgd": 0.9}
ENDED = {"exact": 0.95, "threshold": 0.948, "threshold_98": 0.9475, "threshold_97": 0.945}


def kept(folder):
    """Every contender learns evenly in 10 steps; DDP takes 1 s a step, its fp16 hook 0.5 s, ours 0.25 s."""
    folder.mkdir()
    for name in {same_training(one) for one in (*OURS, *PEERS)}:
        curve = {"steps": [0, 5, 10], "metric": [0.1, 0.5, ENDS.get(name, 0.2)]}
        for seed in range(2):
            (folder / f"trajectory_{name}_seed{seed}.json").write_text(json.dumps(curve))
        if name in ENDED:
            for seed in range(2):
                ended = {"steps": [60], "metric": [ENDED[name] + seed / 100]}
                (folder / f"end_{name}_seed{seed}.json").write_text(json.dumps(ended))
    takes = dict.fromkeys(OURS, 0.25) | {name: 0.5 if "fp16" in name else 1.0 for name in PEERS}
    turns = [{"mode": name, "round": 0, "step_seconds": takes[name], "sent_bytes": 1e6} for name in takes]
    for mbit, notes in ((100, ["quicker way: int8, NOT exact"]), (0, ["in 1 bucket"])):
        told = {"turns": turns, "rounds": 1, "workers": 4, "mbit": mbit, "machine": "a machine", "notes": notes}
        (folder / f"seconds_{mbit}.json").write_text(json.dumps(told))
    live = {"contender": "int8", "mbit": 100.0, "steps": [0, 5, 10], "metric": [0.1, 0.5, 0.88], "seconds": [0, 2, 4.0]}
    (folder / "live_int8_100.json").write_text(json.dumps(live))


def test_seconds_to_a_metric_are_steps_to_it_times_seconds_a_step(tmp_path):
    kept(tmp_path / "perceptron")
    text = page(tmp_path, {"perceptron": TASKS["perceptron"]})
    lines = text.partition("100 Mbit/s")[2].splitlines()
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines}
    assert "wanted 0.884" in text
    steps = 5 + 5 * (0.884 - 0.5) / 0.4
    assert rows["exact"][3:5] == ["4.00", "2.00"] and float(rows["exact"][5]) == pytest.approx(0.25 * steps, abs=0.06)
    assert float(rows["ddp_powersgd"][5]) == pytest.approx(1.0 * steps, abs=0.06)
    assert rows["threshold"][5:] == ["inf", "-"] and rows["ddp_2mb"][6] == "1.00"
    assert "All its steps took 1.60 of the product" in text and "at most 0.0100 from the lockstep's" in text


def test_the_steps_that_go_whole_at_the_start_take_as_long_as_exact_ones():
    seconds = {"exact": 1.0, "low_rank": 0.1, "int8": 0.5}
    assert seconds_to(START + 5, "low_rank", seconds) == START * 1.0 + 5 * 0.1
    assert seconds_to(4, "low_rank", seconds) == 4.0 and seconds_to(4, "int8", seconds) == 2.0
    assert seconds_to(float("inf"), "low_rank", seconds) == float("inf")


def test_every_bar_of_the_page_is_printed_with_its_figure_and_whether_it_is_met(tmp_path):
    kept(tmp_path / "perceptron")
    (tmp_path / "perceptron" / "seconds_0.json").unlink()
    text = page(tmp_path, {"perceptron": TASKS["perceptron"]})
    text, _, bars = text.partition("| bar | wanted | found | verdict |")
    found = {cells[0]: cells[2:] for line in bars.splitlines() if len(cells := line.strip("| ").split(" | ")) == 4}
    assert found == {
        "---": ["---", "---"],
        "100 Mbit/s: steps of threshold, times as fast as DDP": ["4.00", "**miss**"],
        "100 Mbit/s: steps of threshold, times as fast as its fp16 hook": ["2.00", "**miss**"],
        "points that threshold loses beside exact training, trained to the end": ["0.20", "pass"],
        "100 Mbit/s: steps of threshold_98, times as fast as DDP": ["4.00", "**miss**"],
        "100 Mbit/s: steps of threshold_98, times as fast as its fp16 hook": ["2.00", "**miss**"],
        "points that threshold_98 loses beside exact training, trained to the end": ["0.25", "pass"],
        "100 Mbit/s: steps of threshold_97, times as fast as DDP": ["4.00", "**miss**"],
        "100 Mbit/s: steps of threshold_97, times as fast as its fp16 hook": ["2.00", "**miss**"],
        "points that threshold_97 loses beside exact training, trained to the end": ["0.50", "**miss**"],
        "100 Mbit/s: steps of int8, times as fast as DDP": ["4.00", "pass"],
        "100 Mbit/s: steps of int8, times as fast as its fp16 hook": ["2.00", "pass"],
        "points that int8 loses beside exact training": ["1.00", "**miss**"],
        "100 Mbit/s: steps of low_rank, times as fast as torch's PowerSGD hook of its rank": ["4.00", "pass"],
        "points that low_rank loses beside that hook": ["70.00", "**miss**"],
        "no limit: the plan names no lossy way (1: it names none)": ["-", "not measured"],
        "no limit: the quickest coded steps, times as fast as exact ones": ["-", "not measured"],
    }
    assert "| threshold | 0.9530 | 0.0071 | -0.0020, -0.0020 |" in text
    kept(tmp_path / "again")
    said = page(tmp_path, {"again": TASKS["perceptron"]})
    assert "names no lossy way (1: it names none) | 1 | 1.00 | pass" in said
    assert "times as fast as exact ones | below 1.15 | 1.00 | pass" in said


def test_a_small_run_keeps_nothing_and_a_full_one_takes_no_cell_of_other_settings(tmp_path, monkeypatch):
    """What a cell holds is another matter: each is a line that says how it was asked for."""
    monkeypatch.setattr(run, "_job", lambda asked, task, mbit, words: {"asked": [task, mbit, asked.small]})
    monkeypatch.setattr(run, "trajectory", lambda *given: Curve([], [], 0.0))
    monkeypatch.setattr(run, "to_the_end", lambda *given: Curve([], [], 0.0))
    monkeypatch.setattr(run, "page", lambda out, tasks: f"{len([*out.glob('*/*_*.json')])} cells")
    out, asked = tmp_path / "results", ["--task", "perceptron", "--images", "patterns", "--out"]
    assert run.main(["--small", *asked, str(out)]) == 0 and not out.exists()
    assert run.main([*asked, str(out), "--cells", "2"]) == 0
    assert {path.stem for path in out.glob("*/*_*")} == {"seconds_100", "seconds_300"}
    first = (out / "perceptron" / "seconds_100.json").stat().st_mtime_ns
    assert run.main([*asked, str(out)]) == 0 and (tmp_path / "figures.md").read_text() == "44 cells"
    assert (out / "perceptron" / "seconds_100.json").stat().st_mtime_ns == first
    with pytest.raises(ValueError, match=r"holds figures made with .*\"steps\": 1000.*this run has .*\"steps\": 100"):
        run.main([*asked, str(out), "--steps", "100"])


def test_a_metric_is_reached_between_two_looks_whichever_way_is_better():
    assert reached_at([0, 10], [0.0, 1.0], 0.25, True) == 2.5
    assert reached_at([0, 10], [1.0, 0.0], 0.25, False) == 7.5
    assert reached_at([0, 10], [1.0, 0.5], 0.25, False) == float("inf")


def test_a_trajectory_begins_alike_for_all_and_counts_what_is_coded():
    task = TASKS["recommender"]
    workload = task.workload(True, "")
    exact, coded = (trajectory(name, task, workload, 0, [0, 2], 2) for name in ("exact", "int8"))
    assert exact.metric[0] == coded.metric[0] and exact.metric[1] != coded.metric[1]
    assert exact.sent_bytes == 0 < coded.sent_bytes


def test_a_training_that_is_ended_has_the_full_rate_first_and_a_lower_one_later():
    task = TASKS["recommender"]
    workload = task.workload(True, "")
    whole = trajectory("exact", task, workload, 0, [1, 2], 2)
    one, two = (to_the_end("exact", task, workload, 0, steps, 2) for steps in (1, 2))
    assert one.metric == whole.metric[:1] and two.steps == [2] and two.metric != whole.metric[1:]
