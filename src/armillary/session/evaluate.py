"""Evaluates a model on the held-out split: every rank takes its share, the sums are added up over ranks."""

from itertools import islice

import torch

from armillary.session.job import Job
from armillary.session.workload import Workload

__all__ = ["evaluate"]


def evaluate(workload: Workload, run: Job, seed: int, batches: int | None = None) -> dict[str, float]:
    """The workload's metrics over the held-out split, or over the first `batches` of every rank.

    Every rank must call it and every rank gets the same answer. A rank that is done serves the look-ups of the others.
    The model is left in training mode; nothing of this appears in the trace.

    Raises:
        ValueError: no rank has a held-out batch.
    """
    is_recording, run.transport.recording = run.transport.recording, False
    run.model.eval()
    mine: dict[str, float] = {}
    with torch.no_grad():
        for batch in islice(workload.batches("held_out", run.rank, run.workers, seed), batches):
            for name, value in workload.evaluate(run.model, batch).items():
                mine[name] = mine.get(name, 0.0) + value
    run.finish()
    run.model.train()
    run.transport.recording = is_recording
    totals: dict[str, float] = {}
    for theirs in run.transport.share(mine):
        for name, value in theirs.items():
            totals[name] = totals.get(name, 0.0) + value
    if not totals:
        raise ValueError(f"evaluate: {workload.name} gave no held-out batch to any of {run.workers} workers")
    return dict(workload.report(totals))
