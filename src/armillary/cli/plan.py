"""What `armillary plan` does: says what training a workload would take, without training it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from armillary.cli.launch import count_of, rank, run_in_workers
from armillary.cli.request import AskedPlan, AskedWorkload
from armillary.cli.resolve import job_request_of, refuse_unnamed, workload_of
from armillary.cli.terminal import as_json, console_here, decided_page, put
from armillary.planning.demand import PRICE
from armillary.planning.notes import Verdict
from armillary.planning.planner import explain
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.plans.group import Forecast
from armillary.plans.plan import SIMULTANEOUS
from armillary.plans.units import Page, Table
from armillary.session.autotune import alternatives, by_simulation, with_prefetch
from armillary.session.plan_job import JobRequest, assumptions_of, model_to_plan, plan_job, prepared
from armillary.session.run_folder import write_plan
from armillary.session.workload import Workload
from armillary.stages.stages import refuse_uncut

__all__ = ["AskedPrint", "plan_asked"]


class AskedPrint(NamedTuple):
    """How the plan is to be told. out: a file to write it to."""

    out: Path | None
    is_json: bool
    is_verbose: bool


class _Ready(NamedTuple):
    task: Workload
    request: JobRequest


def plan_asked(workload: AskedWorkload, plan: AskedPlan, workers: int | None, seed: int, told: AskedPrint) -> NoReturn:
    """Plans, and ends the process."""

    def prepare() -> _Ready:
        task = workload_of(workload)  # first: it may bring methods of its own
        granted = job_request_of(plan, count_of(workers), workers)
        task = prepared(task, granted, count_of(workers))
        refuse_unnamed(task, granted)
        return _Ready(task, granted)

    def body(ready: _Ready) -> int:
        subject, granted = model_to_plan(ready.task, seed), ready.request
        decided = plan_job(subject, granted)
        if rank() == 0:
            refuse_uncut(decided.plan, subject.model, subject.loss, next(iter(subject.draw(1))))
            case = Case(decided.profile, decided.topology, assumptions_of(subject.optimizer, subject.model))
            is_priced = granted.wanted.rule == PRICE and granted.schedule == SIMULTANEOUS
            found = explain(case, granted.wanted) if is_priced else ()
            whole = _whole_plans(case, granted.wanted) if found else {}
            if told.is_json:
                print(as_json({**vars(decided), "candidates": found, "whole_plans": whole}))
            else:
                considered = (_table(found), *_whole_plans_page(whole)) if found else ()
                put(console_here(), (*decided_page(decided, told.is_verbose), *considered))
            written = () if told.out is None else write_plan(told.out, decided)
            if written and not told.is_json:
                put(console_here(), (f"written: {', '.join(map(str, written))}",))
        return 0

    run_in_workers(workers if plan.topology_file is None else 1, prepare, body)


def _table(found: Sequence[Verdict]) -> Table:
    rows = []
    for verdict in found:
        one, cost = verdict.candidate, verdict.candidate.forecast
        figures = (
            f"{cost.seconds * 1e3:,.2f}",
            f"{cost.sent_bytes / 1e3:,.1f}",
            f"{cost.memory_bytes / (1 << 20):,.1f}",
        )
        rows.append((one.parameter, str(one.choice), *figures, verdict.lost or "chosen"))
    header = ("candidate for", "exchange", "time ms", "sent kB/step", "memory MiB", "why not")
    return Table(header, rows, (0, 1, 5))


def _whole_plans(case: Case, request: PlanRequest) -> dict[str, Forecast]:
    """What each of the plans that `train --autotune` chooses from is expected to take; the quickest first, seconds of
    the step against a clock."""
    plans = with_prefetch(alternatives(case, request), case)
    return {
        name: replace(plans[name].forecast, seconds=simulate(plans[name], case).step_seconds)
        for name in by_simulation(plans, case)
    }


def _whole_plans_page(whole: Mapping[str, Forecast]) -> Page:
    rows = [
        (name, f"{cost.seconds * 1e3:,.2f}", f"{cost.sent_bytes / 1e3:,.1f}", f"{cost.memory_bytes / (1 << 20):,.1f}")
        for name, cost in whole.items()
    ]
    legend = "a step against a clock, compute hiding what it can; with prefetch: in a loop over run.batches"
    return Table(("whole plan", "simulated ms", "sent kB/step", "memory MiB"), rows), legend
