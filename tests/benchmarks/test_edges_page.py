"""The page of coded edges: every bar with its figure, from cells that were kept."""

import json

from benchmarks.edges.contenders import CODED, TORCH
from benchmarks.edges.run import page

TAKES = {"uncoded": 3.0, "hadamard int4": 1.0}  # seconds a step; all others 2
SENT = {"uncoded": 8e6, "DCT": 1.5e6}


def kept(folder, trained=("uncoded", "hadamard int4"), warned=True):
    notes = ["the gradient that comes back to stage 0 is thinned for itself, which is biased"] if warned else []
    notes += ["coded edges do not help at these links: ..."] if warned else []
    for cell, faster in (("slow", 1.0), ("free", 4.0)):
        turns = [
            {"contender": name, "round": 0, "step_seconds": TAKES.get(name, 2.0) / (faster if name == "uncoded" else 1),
             "sent_bytes": SENT.get(name, 1e6), "received_bytes": SENT.get(name, 1e6)}
            for name in (*CODED, TORCH)
        ]  # fmt: skip
        told = {"mbit": 10.0, "stages": 2, "machine": "a machine", "turns": turns}
        told |= {"forecast_bytes": dict.fromkeys((*CODED, TORCH), 1e6), "notes": dict.fromkeys((*CODED, TORCH), notes)}
        (folder / f"seconds_2_{cell}.json").write_text(json.dumps(told))
    for name in trained:
        losses = {"steps": [0, 1], "loss": [2.0, 1.02 if name == "hadamard int4" else 1.0]}
        (folder / f"loss_2_{name.replace(' ', '_')}_0.json").write_text(json.dumps(losses))


def verdicts(text):
    found = [line.strip("| ").split(" | ") for line in text.splitlines()]
    return {cells[0].removeprefix("2 stages: "): cells[2:] for cells in found if len(cells) == 4}


def test_every_bar_is_printed_with_its_figure_and_whether_it_is_met(tmp_path):
    kept(tmp_path)
    found = verdicts(page(tmp_path))
    assert found.pop("steps of hadamard int4, times as fast as uncoded") == ["3.00", "pass"]
    assert found.pop("loss of hadamard int4, per cent above uncoded") == ["2.00", "**miss**"]
    assert found.pop("bytes on the edge of stage 0, times fewer by DCT") == ["5.33", "**miss**"]
    assert found.pop("no limit: the quickest coded steps, times as fast as uncoded") == ["0.75", "pass"]
    assert found.pop("plans that warn, of 2 that thin gradients for themselves") == ["2.00", "pass"]
    assert found.pop("no limit: plans that say that coded edges do not help") == ["8.00", "pass"]
    assert found.pop("uncoded held-out loss at the end, of what it was untrained, worst seed") == ["0.50", "pass"]
    assert found.keys() == {"bar", "---"}


def test_what_was_not_trained_is_not_measured_and_a_plan_that_is_silent_misses(tmp_path):
    kept(tmp_path, trained=(), warned=False)
    found = verdicts(page(tmp_path))
    assert found["loss of hadamard int4, per cent above uncoded"] == ["-", "not measured"]
    assert found["plans that warn, of 2 that thin gradients for themselves"] == ["0.00", "**miss**"]
