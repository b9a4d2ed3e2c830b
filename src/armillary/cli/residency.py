"""What `armillary residency` does: trains a few steps under a memory budget, and plans for other budgets."""

import itertools
from pathlib import Path
from typing import NoReturn

import torch

from armillary import residency
from armillary.cli.launch import run_in_workers
from armillary.cli.names import Refused
from armillary.cli.request import AskedWorkload
from armillary.cli.resolve import workload_of
from armillary.cli.terminal import as_json, console_here, put, tell
from armillary.plans.units import Table
from armillary.session.workload import Workload

__all__ = ["residency_asked"]

STEPS = 10
BUDGETS = 6
MIB = 1 << 20


def residency_asked(
    workload: AskedWorkload, memory_bytes: int, tier: Path | None, stages: list[str], seed: int, is_json: bool
) -> NoReturn:
    """Trains, and ends the process."""

    def prepare() -> Workload:
        return workload_of(workload)

    def body(task: Workload) -> int:
        torch.manual_seed(seed)
        model = task.model()
        optimizer = task.optimizer(model.parameters())
        batches = list(itertools.islice(itertools.cycle(task.batches("train", 0, 1, seed)), STEPS))
        tell("measuring the model stage by stage")
        try:
            held = residency.hold(
                model, batches, task.loss, memory_bytes=memory_bytes, tier=tier, optimizer=optimizer, stages=stages
            )
        except ValueError as error:
            raise Refused(str(error)) from error
        tell(f"training {STEPS} steps")
        with held:
            for number, batch in enumerate(batches):
                optimizer.zero_grad()
                if number == STEPS - 1:
                    with held.counted():
                        task.loss(model, batch).backward()
                else:
                    task.loss(model, batch).backward()
                optimizer.step()
        tell(f"planning for {BUDGETS} budgets")
        others = residency.for_budgets(held.plan, BUDGETS)
        if is_json:
            rows = [
                {"memory_bytes": one.memory_bytes, "residencies": one.residencies, **vars(one.played)} for one in others
            ]
            print(as_json({"plan": held.plan, "measured": held.measured, "budgets": rows}))
        else:
            put(console_here(), (*held.plan.page(), *held.report_page(), _table(others)))
        return 0

    run_in_workers(1, prepare, body)


def _table(plans: tuple[residency.ResidencyPlan, ...]) -> Table:
    rows = []
    for one in plans:
        played, counts = one.played, [one.residencies.count(word) for word in ("keep", "recompute", "swap")]
        figures = (
            f"{(one.memory_bytes or 0) / MIB:,.1f}",
            f"{played.peak_bytes / MIB:,.1f}",
            f"{played.seconds * 1e3:,.1f}",
            f"{played.moved_bytes / MIB:,.1f}",
        )
        rows.append((*figures, *map(str, counts)))
    return Table(("budget MiB", "peak MiB", "a pass ms", "moved MiB", "keep", "recompute", "swap"), rows, left=())
