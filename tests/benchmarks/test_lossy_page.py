"""The page of lossy exchanges: steps to a metric times seconds a step, from cells that were kept; one trained here."""

import json

import pytest
from benchmarks.lossy.contenders import OURS, PEERS, same_training
from benchmarks.lossy.report import page, reached_at
from benchmarks.lossy.tasks import TASKS
from benchmarks.lossy.trajectory import trajectory

ENDS = {"exact": 0.9, "int8": 0.89, "ddp_fp16_25mb": 0.9, "ddp_powersgd": 0.9}


def kept(folder):
    """Every contender learns evenly in 10 steps; DDP takes 1 s a step, its fp16 hook 0.5 s, ours 0.25 s."""
    folder.mkdir()
    for name in {same_training(one) for one in (*OURS, *PEERS)}:
        curve = {"steps": [0, 5, 10], "metric": [0.1, 0.5, ENDS.get(name, 0.2)]}
        for seed in range(2):
            (folder / f"trajectory_{name}_seed{seed}.json").write_text(json.dumps(curve))
    takes = dict.fromkeys(OURS, 0.25) | {name: 0.5 if "fp16" in name else 1.0 for name in PEERS}
    turns = [{"mode": name, "round": 0, "step_seconds": takes[name], "sent_bytes": 1e6} for name in takes]
    told = {"turns": turns, "rounds": 1, "workers": 4, "mbit": 100.0, "machine": "a machine"}
    (folder / "seconds_100.json").write_text(json.dumps(told))
    live = {"contender": "int8", "mbit": 100.0, "steps": [0, 5, 10], "metric": [0.1, 0.5, 0.88], "seconds": [0, 2, 4.0]}
    (folder / "live_int8_100.json").write_text(json.dumps(live))


def test_seconds_to_a_metric_are_steps_to_it_times_seconds_a_step(tmp_path):
    kept(tmp_path / "perceptron")
    text = page(tmp_path, {"perceptron": TASKS["perceptron"]})
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in text.splitlines()[15:]}
    assert "wanted 0.884" in text
    steps = 5 + 5 * (0.884 - 0.5) / 0.4
    assert rows["exact"][3:5] == ["4.00", "2.00"] and float(rows["exact"][5]) == pytest.approx(0.25 * steps, abs=0.06)
    assert rows["threshold"][5:] == ["inf", "-"] and rows["ddp_2mb"][6] == "1.00"
    assert "All its steps took 1.60 of the product" in text and "at most 0.0100 from the lockstep's" in text


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
