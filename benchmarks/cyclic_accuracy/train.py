"""One training run: a task, a rule, a rate, a seed, so many steps; what it found is plain data.

Trained by the reference (`reference/versions.py`), which every cyclic runtime equals bit for bit and which is a tenth
faster than the one-device runtime here. Evaluation and the curve are of the newest weights and of the weights that
were read, respectively.
"""

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from armillary.reference.versions import Reference
from benchmarks.cyclic_accuracy.rules import rules_of
from benchmarks.cyclic_accuracy.tasks import TASKS

__all__ = ["Settings", "rate_at", "train"]

WINDOWS = 50  # points of a curve
RISING_SHARE = 0.1  # of the steps, in which the rate rises
HOPELESS = 3.0  # times the first loss: training has diverged


@dataclass(frozen=True)
class Settings:
    """What names a run."""

    task: str
    rule: str
    rate: float  # the highest of the run
    seed: int
    steps: int

    def __post_init__(self) -> None:
        if self.rule not in rules_of(self.task) or not self.rate > 0 or self.steps < WINDOWS:
            raise ValueError(f"cyclic_accuracy: want a known rule, rate > 0 and steps >= {WINDOWS}, got {self}")

    @property
    def name(self) -> str:
        return f"{self.task}/{self.rule}/rate{self.rate:g}_seed{self.seed}_steps{self.steps}"


def rate_at(step: int, steps: int, highest: float) -> float:
    """Up in a line over the first tenth, then down to nothing along a cosine."""
    rising = RISING_SHARE * steps
    if step < rising:
        return highest * (step + 1) / (rising + 1)
    return highest * 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))


def train(settings: Settings) -> dict[str, Any]:
    """Losses in windows, the scores on held-out data, and the seconds it took (of this process's processor)."""
    task, rule = TASKS[settings.task], rules_of(settings.task)[settings.rule]
    torch.manual_seed(settings.seed)
    parts = task.make()
    optimizer = task.optimizer(parts.model, settings.rate, rule.is_nesterov)
    schedule = rule.schedule(parts.costs)
    reference = Reference(parts.stages, optimizer, schedule, parts.loss, seed=settings.seed)
    reference.corrections = rule.built_corrections()
    losses: list[float] = []
    begun = time.process_time()
    for step, batches in zip(range(settings.steps), task.micro_batches(settings.seed)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, settings.steps, settings.rate)
        losses.append(float(torch.stack(reference.step(batches)).mean()))
        if not losses[-1] < HOPELESS * losses[0]:
            break
    seconds = time.process_time() - begun
    diverged = len(losses) < settings.steps
    return {
        **vars(settings),
        "stale_share": schedule.stale_share,
        "diverged_at": len(losses) if diverged else None,
        "losses": windows(losses, settings.steps) if not diverged else [],
        "last_tenth": None if diverged else sum(losses[-settings.steps // 10 :]) / len(losses[-settings.steps // 10 :]),
        "held_out": None if diverged else task.evaluate(parts.model),
        "cpu_seconds": seconds,
    }


def windows(losses: list[float], steps: int) -> list[float]:
    """Means over WINDOWS equal parts of a run."""
    edges = [steps * place // WINDOWS for place in range(WINDOWS + 1)]
    return [round(sum(losses[a:b]) / (b - a), 5) for a, b in pairwise(edges)]
