"""`armillary plan`: what training a workload would take, without training it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.options import (
    AsJson,
    Corpus,
    Exchanges,
    IsSmall,
    Lazy,
    ProfileFile,
    Replicate,
    Seed,
    Set,
    TopologyFile,
    Workers,
    WorkloadName,
    read_profile,
    wishes,
    workload_of,
)  # fmt: skip
from armillary.cli.schedule_options import Schedule, scheduled
from armillary.cli.show import as_json, decided_text
from armillary.cli.workers import rank, run_in_workers
from armillary.facts.plan import SIMULTANEOUS, Forecast
from armillary.facts.profile_table import aligned
from armillary.planning.explanation import Verdict
from armillary.planning.planner import explain
from armillary.planning.pricing import Assumptions, Case
from armillary.planning.rivals import by_simulation, rivals, with_look_ahead
from armillary.planning.simulator import simulate
from armillary.session.decide import Wishes, assumptions_of, decide, subject_of
from armillary.session.events import Decided

__all__ = ["plan_command"]


def plan_command(
    workload: WorkloadName,
    workers: Workers = None,
    seed: Seed = 0,
    small: IsSmall = False,
    corpus: Corpus = "",
    options: Set = [],  # noqa: B006  typer copies it
    lazy: Lazy = [],  # noqa: B006
    replicate: Replicate = [],  # noqa: B006
    exchange: Exchanges = [],  # noqa: B006
    schedule: Schedule = SIMULTANEOUS.name,
    topology_file: TopologyFile = None,
    profile_file: ProfileFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan to this file, to edit it or for train --plan.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Profiles WORKLOAD, measures the links between the workers, and prints the plan, its forecast, every candidate for
    a table, and whole plans, with look-ahead and without, by the step that is simulated.

    With --topology nothing is measured and no worker is started: the file says what is planned for. With --profile the
    model is not run. `armillary measure` writes both files.
    """

    def body() -> int:
        task = workload_of(workload, options, corpus, small)
        granted = scheduled(schedule, wishes(lazy, replicate, exchange, None, topology_file))
        if profile_file is not None:
            granted = replace(granted, profile=read_profile(profile_file))
        subject = subject_of(task, seed)
        decided = decide(subject, granted)
        if rank() == 0:
            taken = assumptions_of(subject.optimizer)
            found = () if granted.owns_loop else _candidates(decided, granted, taken)
            whole = _whole_plans(decided, granted, taken) if found else {}
            if json:
                print(as_json({**vars(decided), "candidates": found, "whole_plans": whole}))
            else:
                print("\n".join([decided_text(decided), *([_table(found), _whole_table(whole)] if found else [])]))
            if out is not None:
                decided.plan.save(out)
        return 0

    run_in_workers(workers if topology_file is None else 1, body)


def _candidates(decided: Decided, granted: Wishes, assumptions: Assumptions) -> tuple[Verdict, ...]:
    """Every way priced for what is read by row."""
    return explain(
        decided.profile,
        decided.topology,
        constraints=granted.constraints,
        lazy=granted.lazy,
        assumptions=assumptions,
    )


def _table(found: Sequence[Verdict]) -> str:
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
    return f"{aligned(header, rows, left=(0, 1, 5))}\n"


def _whole_plans(decided: Decided, granted: Wishes, assumptions: Assumptions) -> dict[str, Forecast]:
    """What each of the plans that `train --trials` chooses from is expected to take; the quickest first, seconds of the
    step against a clock."""
    case = Case(decided.profile, decided.topology, assumptions)
    found = rivals(
        decided.profile,
        decided.topology,
        constraints=granted.constraints,
        lazy=granted.lazy,
        assumptions=assumptions,
    )
    plans = with_look_ahead(found, case)
    return {
        name: replace(plans[name].forecast, seconds=simulate(plans[name], case).step_seconds)
        for name in by_simulation(plans, case)
    }


def _whole_table(whole: Mapping[str, Forecast]) -> str:
    rows = [
        (name, f"{cost.seconds * 1e3:,.2f}", f"{cost.sent_bytes / 1e3:,.1f}", f"{cost.memory_bytes / (1 << 20):,.1f}")
        for name, cost in whole.items()
    ]
    table = aligned(("whole plan", "simulated ms", "sent kB/step", "memory MiB"), rows)
    return f"{table}\na step against a clock, compute hiding what it can; with look-ahead: in a loop over run.batches\n"
