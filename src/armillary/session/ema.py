"""`run.ema(decay)`: an exponential moving average of all parameters, tables whose rows are spread among them.

`torch.optim.swa_utils.AveragedModel` copies the model, which such a table does not allow; this averages where the
values are, and gives the same numbers (`average.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from armillary.session.average import Average
from armillary.session.export import export_model
from armillary.session.job import Job

__all__ = ["Ema", "begin_ema"]


class Ema:
    """After each `optimizer.step()` every rank calls `update`. `run.save` saves it, `run.load` loads it, on any number
    of workers and under any plan; make it before loading.

    Raises (every method):
        RuntimeError: the run is closed, or the model shows averages (`update`, `export`).
    """

    def __init__(self, job: Callable[[], Job], average: Average) -> None:
        """job: the run, while it is open."""
        self._job, self._average = job, average

    @property
    def decay(self) -> float:
        return self._average.decay

    @property
    def updates(self) -> int:
        """How often it was updated."""
        return self._average.updates

    def update(self) -> None:
        """Takes the parameters of this moment in; the first time it becomes them. Asks nobody."""
        job = self._open("update")
        self._average.update(job.model, job.tables)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Collective. Inside, the model holds the averages (and its own buffers), on every rank, without gradients;
        each rank may read as much as it likes. Afterwards it holds what it had, bit for bit.

        Raises:
            ValueError: ranks have made different numbers of updates.
        """
        job = self._open("shown")
        with torch.no_grad(), job.transport.unrecorded():
            with job.transport.within("ema.shown"):
                job.serve()
                self._refuse_uneven(job)
                job.settle()
            self._average.swap(job.model, job.tables)
            try:
                yield
                with job.transport.within("the end of ema.shown"):
                    job.settle()  # others may read still
            finally:
                self._average.swap(job.model, job.tables)

    def export(self) -> dict[str, Any] | None:
        """Collective.

        Returns:
            On rank 0 a state_dict of the plain model with averages in place of parameters, copies on the CPU; None on
            the other ranks.

        Raises:
            ValueError: ranks have made different numbers of updates.
        """
        job = self._open("export")
        with self.shown(), job.transport.within("ema.export"):
            return export_model(job)

    def _open(self, call: str) -> Job:
        job = self._job()
        if any(average.is_shown for average in job.averages.values()):
            raise RuntimeError(f"rank {job.rank}: ema.{call}: inside ema.shown(); leave its block first")
        if job.not_whole:  # since the run has moved to another plan
            raise ValueError(_why_not(job))
        return job

    def _refuse_uneven(self, job: Job) -> None:
        everyones = job.transport.share(self.updates)
        if len(set(everyones)) > 1:
            raise ValueError(
                f"run.ema: ranks have made different numbers of updates {everyones} (rank order); call ema.update() on "
                "every rank after each optimizer step"
            )


def begin_ema(job: Callable[[], Job], decay: float) -> Ema:
    """Collective, between two steps: the average of that decay, from the parameters as they are if it is new.

    Raises:
        ValueError: decay is not between 0 and 1, ranks give different ones, or the model does not hold the newest
            weights between two steps.
    """
    run, decay = job(), float(decay)
    everyones = run.transport.share(decay)
    if not all(0.0 <= one <= 1.0 for one in everyones) or len(set(everyones)) > 1:
        raise ValueError(f"run.ema: want one decay from 0 to 1 on all ranks, got {everyones} (rank order)")
    if run.not_whole:
        raise ValueError(_why_not(run))
    average = run.averages.setdefault(repr(decay), Average(decay))
    if not average.updates and not average.whole:
        run.keep_up()
        average.begin(run.model, run.tables)
    return Ema(job, average)


def _why_not(run: Job) -> str:
    return (
        f"run.ema: {run.not_whole}, so there is nothing to average. Remedy: average what run.export() gives, every so "
        "many steps, or plan for a loop of your own"
    )
