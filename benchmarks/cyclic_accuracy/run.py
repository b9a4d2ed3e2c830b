"""The runs of one task, one after the other: python -m benchmarks.cyclic_accuracy.run --task vision

First the sweep of the learning rate, for every rule by itself, all with one seed. Then more seeds at the rate with the
lowest training loss at the end of the sweep's run, which is itself the first of the seeds; held-out data has no part
in the choice. Every run is one file under results/, and a run whose file is there is not run again.
"""

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.cyclic_accuracy.rules import rules_of
from benchmarks.cyclic_accuracy.tasks import TASKS
from benchmarks.cyclic_accuracy.train import Settings, train
from benchmarks.measuring.record import machine

__all__ = ["RESULTS", "best_rate", "beyond", "final_runs", "swept"]

RESULTS = Path(__file__).parent / "results"
SWEEP_SEED = 100
MOST_RATES = 7  # that the sweep of one rule tries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--rules", nargs="+", default=[], help="some only; all if not said")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="beside the sweep's")
    parser.add_argument("--steps", type=int, default=0, help="of the runs of these seeds; as many as in the sweep if 0")
    parser.add_argument("--until", default="", help="of the clock, HH:MM: no run begins after it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task, rules = TASKS[options.task], options.rules or list(rules_of(options.task))
    for rule in rules:
        for rate in task.rates:
            _keep(Settings(options.task, rule, rate, SWEEP_SEED, task.steps), options.until)
        while (further := beyond(swept(options.task, rule))) is not None:
            _keep(Settings(options.task, rule, further, SWEEP_SEED, task.steps), options.until)
    for seed in options.seeds:
        for rule in rules:
            rate = best_rate(swept(options.task, rule))
            _keep(Settings(options.task, rule, rate, seed, options.steps or task.steps), options.until)


def swept(task: str, rule: str) -> dict[float, float]:
    """Training loss at the end of the sweep's runs, by rate; infinite where a run diverged."""
    found = {}
    for path in (RESULTS / task / rule).glob(f"*_seed{SWEEP_SEED}_steps{TASKS[task].steps}.json"):
        record = json.loads(path.read_text())
        found[record["rate"]] = math.inf if record["last_tenth"] is None else record["last_tenth"]
    return dict(sorted(found.items()))


def final_runs(task: str, steps: int) -> dict[str, dict[int, Mapping[str, Any]]]:
    """By rule, then seed: the runs of so many steps at the rate the sweep chose; rules without any are left out."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rule in rules_of(task):
        rate = best_rate(swept(task, rule))
        paths = sorted((RESULTS / task / rule).glob(f"rate{rate:g}_seed*_steps{steps}.json"))
        runs = [json.loads(path.read_text()) for path in paths]
        found[rule] = {run["seed"]: run for run in runs}
    return {rule: runs for rule, runs in found.items() if runs}


def best_rate(losses: Mapping[float, float]) -> float:
    return min(losses, key=lambda rate: (losses[rate], rate))


def beyond(losses: Mapping[float, float]) -> float | None:
    """The rate to try next: past the end of the sweep if the best is there; None once it is inside."""
    best = best_rate(losses)
    if len(losses) >= MOST_RATES:
        return None
    if best == max(losses):
        return best * 2
    return best / 2 if best == min(losses) else None


def _keep(settings: Settings, until: str) -> None:
    """Trains and writes the file, unless it is there."""
    path = RESULTS / f"{settings.name}.json"
    if path.is_file():
        return
    if until and time.strftime("%H:%M") >= until:
        raise SystemExit(f"it is past {until}; {settings.name} and what comes after it wait for the next call")
    found = train(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **found}) + "\n")
    score = found["held_out"] or f"diverged at step {found['diverged_at']}"
    print(f"{settings.name}: {found['last_tenth']} {score} {found['cpu_seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
