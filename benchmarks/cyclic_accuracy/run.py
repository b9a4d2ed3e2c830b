"""The runs of one task, one after the other: python -m benchmarks.cyclic_accuracy.run --task vision

First the sweep of the learning rate, for every rule by itself: short runs with a seed of their own. Then three seeds
at the rate with the lowest training loss at the end of the short run; held-out data has no part in the choice. Every
run is one file under results/, and a run whose file is there is not run again.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.cyclic_accuracy.rules import rules_of
from benchmarks.cyclic_accuracy.tasks import TASKS
from benchmarks.cyclic_accuracy.train import Settings, train

__all__ = ["RESULTS", "SWEEP_SEED", "best_rate", "beyond", "swept"]

RESULTS = Path(__file__).parent / "results"
SWEEP_SEED, SEEDS = 100, (0, 1, 2)
MOST_RATES = 7  # that the sweep of one rule tries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--rules", nargs="+", default=[], help="some only; all if not said")
    parser.add_argument("--until", default="", help="of the clock, HH:MM: no run begins that would end after it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task, rules = TASKS[options.task], options.rules or list(rules_of(options.task))
    for rule in rules:
        for rate in task.rates:
            _kept(Settings(options.task, rule, rate, SWEEP_SEED, task.sweep_steps), options.until)
        while (further := beyond(swept(options.task, rule))) is not None:
            _kept(Settings(options.task, rule, further, SWEEP_SEED, task.sweep_steps), options.until)
    for seed in options.seeds:
        for rule in rules:
            rate = best_rate(swept(options.task, rule))
            _kept(Settings(options.task, rule, rate, seed, task.steps), options.until)


def swept(task: str, rule: str) -> dict[float, float]:
    """Training loss at the end of the short runs there are, by rate; infinite where a run diverged."""
    found = {}
    for path in (RESULTS / task / rule).glob(f"*_seed{SWEEP_SEED}_steps{TASKS[task].sweep_steps}.json"):
        record = json.loads(path.read_text())
        found[record["rate"]] = math.inf if record["last_tenth"] is None else record["last_tenth"]
    return dict(sorted(found.items()))


def best_rate(losses: dict[float, float]) -> float:
    return min(losses, key=lambda rate: (losses[rate], rate))


def beyond(losses: dict[float, float]) -> float | None:
    """The rate to try next: past the end of the sweep if the best is there; None once it is inside."""
    best = best_rate(losses)
    if len(losses) >= MOST_RATES:
        return None
    if best == max(losses):
        return best * 2
    return best / 2 if best == min(losses) else None


def _kept(settings: Settings, until: str) -> dict[str, Any]:
    path = RESULTS / f"{settings.name}.json"
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    if until and time.strftime("%H:%M") >= until:
        raise SystemExit(f"it is past {until}; {settings.name} and what comes after it wait for the next call")
    found = train(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found) + "\n")
    score = found["held_out"] or f"diverged at step {found['diverged_at']}"
    print(f"{settings.name}: {found['last_tenth']} {score} {found['cpu_seconds']:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    main()
