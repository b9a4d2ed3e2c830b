"""What a script leaves for `armillary compare`: its plan, what that was made from, a trace, the figures of a report.

The most that tensors take in a step is not among it: to count that, every operation of a step is looked at, which is
done in the steps of `armillary train` and not in those of somebody else's loop.
"""

import json
from dataclasses import asdict
from pathlib import Path
from warnings import warn

from armillary.facts.trace import Trace
from armillary.session.events import Decided
from armillary.session.folder import keep_decision
from armillary.session.job import Job
from armillary.session.rank_zero import by_rank_zero
from armillary.session.report import Report, last_steps, report_of

__all__ = ["kept_report"]

FEWEST_STEPS = 2  # from the end of one to that of the next a step is timed


def kept_report(run: Job, folder: Path) -> Report:
    """Collective; rank 0 writes. A job that is started once more when it has ended takes no step: what it left before
    stays, and rank 0 warns.

    Raises:
        ValueError: the run does not know what its plan was made from, or the folder cannot be written.
    """
    trace = last_steps(run)
    report = report_of(run, trace)
    profile, topology = run.job.profile, run.job.topology
    if profile is None or topology is None:
        raise ValueError(
            "run.report: the run does not know what its plan was made from, which compare plays; give attach "
            "profile=... and topology=... (parallelize does, once its watched steps are over)"
        )
    if report.steps < FEWEST_STEPS:
        if run.rank == 0:
            warn(
                f"run.report: the plan has taken {report.steps} steps, and a folder to compare wants {FEWEST_STEPS} at "
                f"least; {folder} is left as it is",
                stacklevel=1,
            )
        return report
    last = run.transport.step
    told = {
        "comparison": [asdict(line) for line in report.lines], "forecast": asdict(run.plan.forecast),
        "peak_bytes": None, "resident_bytes": None, "step_seconds": report.step_seconds,
        "from_step": last - report.steps, "steps": last,
    }  # fmt: skip
    decided = Decided(profile, topology, run.plan)
    by_rank_zero(run.transport, lambda: _write(folder, decided, trace, json.dumps(told, indent=2)))
    return report


def _write(folder: Path, decided: Decided, trace: Trace, summary: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        keep_decision(folder, decided)
        trace.save(folder / "trace.json")
        (folder / "summary.json").write_text(summary + "\n")
    except OSError as error:
        raise ValueError(f"run.report: cannot write to {folder} ({error.strerror}); give another folder") from None
