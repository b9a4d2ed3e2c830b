"""The largest stable learning rate under delay, measured by the one-device runtime and beside its formula.

    python -m benchmarks.cyclic_accuracy.boundary

On a quadratic every curvature trains by itself, so one run tries thousands of (rate x curvature) at once: the model is
a chain of N stages, each with a vector of weights w of curvatures c and the loss sum(c w w / 2). The stable shrink.
Under slack 0, stage j has a share (N - 1 - j) / N of its gradients one step late.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from armillary.schedules import Schedule, build_correction, stale_share
from armillary.schedules.cyclic import cyclic
from armillary.schedules.simultaneous import simultaneous
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import chain, cut
from armillary.stages.train_spec import TrainSpec
from benchmarks.measuring.record import machine

__all__ = ["formula", "last_stable", "measured"]

RESULT = Path(__file__).parent / "results" / "boundary.json"
N = 4
STEPS, WINDOW = 400, 100
LOWEST, HIGHEST, POINTS = 0.02, 8.0, 3000  # of rate x curvature: neighbours are 0.2 per cent apart
# Of heavy ball 0.9 where everything is one step late, with a correction: the note's figures. Weights are predicted by
# the momentum buffer times the rate, which is the last velocity.
NOTED = {"nesterov": 0.253, "weight_prediction": 0.270}


class Bowl(nn.Module):
    """Adds this stage's share of the loss to the value."""

    def __init__(self, curvatures: Tensor) -> None:
        super().__init__()
        self.curvatures = curvatures
        self.weight = nn.Parameter(torch.ones_like(curvatures))

    def forward(self, value: Tensor) -> Tensor:
        added: Tensor = value + (self.curvatures * self.weight.square()).sum() / 2
        return added


def main() -> None:
    torch.set_num_threads(1)
    schedules = {"dp": simultaneous(N, N), "v1": cyclic(N, slack=N), "v2": cyclic(N), "slack1": cyclic(N, slack=1)}
    rows: list[dict[str, Any]] = []
    for rule, momentum in (("dp", 0.9), ("v1", 0.9), ("v2", 0.9), ("slack1", 0.9), ("dp", 0.0), ("v1", 0.0)):
        rows += measured(rule, schedules[rule], momentum, "")
    for rule, correction in (
        ("v1", "nesterov"),
        ("v1", "weight_prediction"),
        ("v1", "error_feedback"),
        ("v2", "stable_rate"),
    ):
        rows += measured(rule, schedules[rule], 0.9, correction)
    for row in rows:
        print(json.dumps(row), flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"machine": machine(), "steps": STEPS, "points": POINTS, "rows": rows}) + "\n")


def measured(rule: str, schedule: Schedule, momentum: float, correction: str) -> list[dict[str, Any]]:
    """Per different share of late gradients, the largest rate x curvature below which all shrink."""
    grid = torch.logspace(*torch.tensor([LOWEST, HIGHEST]).log10().tolist(), POINTS, dtype=torch.float64)
    begun = time.perf_counter()
    early, late = _trained(schedule, grid, momentum, correction)
    rows: dict[float, dict[str, Any]] = {}
    for stage in range(schedule.stages):
        share = stale_share(schedule, stage)
        rows[share] = {
            "rule": rule, "momentum": momentum, "correction": correction, "share": share,
            "predicted": _predicted(share, momentum, correction),
            "measured": last_stable(grid.tolist(), ((late[stage] < early[stage]) | (late[stage] == 0)).tolist()),
        }  # fmt: skip
    print(f"{rule} {momentum} {correction}: {time.perf_counter() - begun:.0f} s", flush=True)
    return list(rows.values())


def _predicted(share: float, momentum: float, correction: str) -> float | None:
    """None where there is no figure to compare with."""
    if not correction or not share:
        return formula(share, momentum)
    if correction == "stable_rate":  # lowers the rate of each stage until all have the bound of fresh weights
        return formula(0.0, momentum)
    return NOTED.get(correction) if share == 1 else None


def _trained(schedule: Schedule, grid: Tensor, momentum: float, correction: str) -> tuple[list[Tensor], list[Tensor]]:
    """Per stage the largest weights in a window in the middle of the run, and in one at its end."""
    model = nn.Sequential(*(Bowl(grid) for _ in range(schedule.stages)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
    stages = cut(model, chain(model), range(1, schedule.stages))
    corrections = (build_correction(correction),) if correction else ()
    run = Interpreter(stages, optimizer, TrainSpec(schedule, lambda value, _: value, corrections=corrections))
    start = torch.zeros((), dtype=torch.float64)
    early, late = [[torch.zeros_like(grid) for _ in stages] for _ in range(2)]
    for step in range(STEPS):
        run.step([(start, None)] * schedule.micro_batches)
        for largest, end in ((early, STEPS // 2), (late, STEPS)):
            if end - WINDOW <= step < end:
                for stage, weight in enumerate(model.parameters()):
                    largest[stage] = torch.maximum(largest[stage], weight.detach().abs())
    return early, late


def last_stable(grid: Sequence[float], is_stable: Sequence[bool]) -> float:
    """The value of a rising grid below which, itself included, everything is stable; ValueError if there is none."""
    end = list(is_stable).index(False) if False in is_stable else len(grid)
    if not 0 < end < len(grid):
        raise ValueError(f"boundary: it lies outside {grid[0]} to {grid[-1]}; widen the grid")
    return grid[end - 1]


def formula(share: float, momentum: float) -> float:
    """Of rate x curvature, for heavy ball with a share of the gradients one step late.

    The iteration's polynomial is z^2 - (1 + mu - a (1 - s)) z + (mu + a s), with a = rate x curvature.
    """
    bounds = [(1 - momentum) / share] if share else []
    if share < 1 / 2:
        bounds.append(2 * (1 + momentum) / (1 - 2 * share))
    return min(bounds)


if __name__ == "__main__":
    main()
