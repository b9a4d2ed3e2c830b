"""What every rank runs: the same training by either revision, and by the older one once more, by turns."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measuring.record import machine
from benchmarks.revisions.cases import CASES, Case
from benchmarks.revisions.source import Source

__all__ = ["alike", "training"]

WARM_STEPS = 5
MOST_TRIES = 8  # at plans that agree: each is made from seconds that its revision measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--older", type=Path, required=True)
    parser.add_argument("--newer", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = CASES[options.case]
    sources = {"older": Source(options.older), "newer": Source(options.newer), "older again": Source(options.older)}
    plans = alike(case, sources, options.small)
    steps = {name: training(case, source, plans[name], options.small) for name, source in sources.items()}
    turns: list[dict[str, Any]] = []
    for number in range(options.rounds):
        names = list(steps)
        first = number % len(names)  # another one begins every round
        turns.append({name: _seconds(steps[name], options.steps) for name in names[first:] + names[:first]})
    if dist.get_rank() == 0:
        found = {"machine": machine(), "case": options.case, "steps": options.steps, "rounds": turns}
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()


def alike(case: Case, sources: dict[str, Source], small: bool) -> dict[str, str]:
    """Every revision's own plan, as JSON; all exchange and cut the same way.

    Raises:
        RuntimeError: no such plans were found.
    """
    found: list[dict[str, str]] = [{}]
    if dist.get_rank() == 0:
        for _ in range(MOST_TRIES):
            plans = {name: _planned(case, source, small) for name, source in sources.items()}
            if len({_ways(plan) for plan in plans.values()}) == 1:
                found[0] = {name: plan.to_json() for name, plan in plans.items()}
                break
    dist.broadcast_object_list(found)
    if not found[0]:
        raise RuntimeError(f"revisions: the plans of {case.schedule} differ: {[_ways(p) for p in plans.values()]}")
    return found[0]


def _planned(case: Case, source: Source, small: bool) -> Any:
    with source:
        face = source.armillary
        link = face.Link(1e-4, case.mbit_per_second * 1e6 / 8)
        machines = face.Topology(case.workers, 1, link, link, 1 << 34)
        draws = [case.draw(small, rank) for rank in range(case.workers)]
        batches = [next(draw) for draw in draws]
        profile = face.profile(case.model(small), batches, case.loss, workers=case.workers)
        return face.plan(
            profile, machines, constraints=case.constraints or {}, schedule=face.Choice.parse(case.schedule)
        )


def _ways(plan: Any) -> str:
    """How a plan exchanges and cuts, without its forecasts."""
    groups = [(group.name, str(group.exchange), tuple(group.parameters)) for group in plan.groups]
    return str((groups, str(plan.schedule), [stage.begins for stage in plan.stages]))


def training(case: Case, source: Source, plan: str, small: bool) -> Callable[[], object]:
    """A step of it, on this rank's data."""
    with source:
        face, model = source.armillary, case.model(small)
        made = face.Plan.from_json(plan)
        draw = case.draw(small, made.mesh.data_coordinate(dist.get_rank()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = face.attach(made, model, optimizer, loss=case.loss, example=next(draw))

    def step() -> None:
        with source:
            run.step([next(draw) for _ in range(case.micro_batches)])

    for _ in range(WARM_STEPS):
        step()
    return step


def _seconds(step: Callable[[], object], steps: int) -> float:
    """Of a step: from a barrier to a barrier."""
    step()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    main()
