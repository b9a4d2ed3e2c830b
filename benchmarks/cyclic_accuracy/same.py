"""Whether the runs speak for the runtime, and one run for two rules: python -m benchmarks.cyclic_accuracy.same

For every task and rule some steps are taken by the reference, which made the runs, and by the one-device runtime from
the same weights. Besides, v1's schedule and that of delayed all-reduce, both by the reference. Ends with 1 if any
weight differs by a bit.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.reference.versions import Reference
from armillary.schedules import Schedule
from armillary.schedules.delayed_all_reduce import delayed_all_reduce
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import Stage
from armillary.stages.train_spec import TrainSpec
from benchmarks.cyclic_accuracy.rules import WORKERS, Rule, rules_of
from benchmarks.cyclic_accuracy.tasks import TASKS, Cut
from benchmarks.cyclic_accuracy.train import rate_at
from benchmarks.measuring.record import machine

RESULT = Path(__file__).parent / "results" / "same.json"
STEPS = 3

Made = tuple[Callable[[Sequence[Any]], object], Callable[[], object]]  # a step; what finishes what is under way


def main() -> int:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for task in TASKS:
        for name, rule in rules_of(task).items():
            truth = _weights(task, rule, rule.schedule, _by_reference)
            runtime = _weights(task, rule, rule.schedule, _on_one_device)
            rows.append({"task": task, "rule": name, "against": "one_device", "is_same": _equal(truth, runtime)})
            if name == "v1":
                late = _weights(task, rule, lambda costs: delayed_all_reduce(WORKERS, len(costs)), _by_reference)
                rows.append(
                    {"task": task, "rule": name, "against": "delayed all-reduce", "is_same": _equal(truth, late)}
                )
    for row in rows:
        print(json.dumps(row), flush=True)
    RESULT.write_text(json.dumps({"machine": machine(), "steps": STEPS, "rows": rows}) + "\n")
    return int(not all(row["is_same"] for row in rows))


def _weights(
    task: str,
    rule: Rule,
    schedule_of: Callable[[Any], Schedule],
    make: Callable[[Cut, torch.optim.Optimizer, Schedule, Rule], Made],
) -> list[Tensor]:
    torch.manual_seed(0)
    parts = TASKS[task].make()
    rate = TASKS[task].rates[0]
    optimizer = TASKS[task].optimizer(parts.model, rate, rule.is_nesterov)
    step, settle = make(parts, optimizer, schedule_of(parts.costs), rule)
    for number, batches in zip(range(STEPS), TASKS[task].micro_batches(0)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(number, STEPS, rate)
        step(batches)
    settle()
    return [tensor.detach().clone() for tensor in [*parts.model.parameters(), *parts.model.buffers()]]


def _by_reference(parts: Cut, optimizer: torch.optim.Optimizer, schedule: Schedule, rule: Rule) -> Made:
    run = Reference(parts.stages, optimizer, schedule, parts.loss)
    run.corrections = rule.built_corrections()
    return run.step, lambda: None


def _on_one_device(parts: Cut, optimizer: torch.optim.Optimizer, schedule: Schedule, rule: Rule) -> Made:
    stages = [
        Stage(j, stage, {name: name for name, _ in stage.named_parameters()}) for j, stage in enumerate(parts.stages)
    ]
    run = Interpreter(stages, optimizer, TrainSpec(schedule, parts.loss, corrections=rule.built_corrections()))
    return run.step, run.settle


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
