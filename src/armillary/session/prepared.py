"""A workload whose model has what a schedule wants besides: heads, for stages that learn from losses of their own."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from armillary.schedules.method import Prepare, ScheduleOptions
from armillary.schedules.registry import options_of, read
from armillary.session.decide import JobRequest
from armillary.session.workload import Workload

__all__ = ["prepared"]


def prepared(workload: Workload, request: JobRequest, workers: int) -> Workload:
    """The workload itself, unless the schedule of the request changes models.

    Args:
        workers: of the job, where the request names no machines.

    Raises:
        ValueError: options of the schedule that do not go together.
    """
    plan, workers = request.plan, workers if request.topology is None else request.topology.workers
    options = read(request.wanted.schedule, workers) if plan is None else options_of(plan)
    prepare = options.method.prepare
    return workload if prepare is None else cast(Workload, _Prepared(workload, options, prepare))


@dataclass(frozen=True)
class _Prepared:
    """All but the model is the workload's own."""

    workload: Workload
    options: ScheduleOptions
    prepare: Prepare

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.workload, name)

    def model(self) -> nn.Module:
        """Heads draw their first values behind the model's."""
        with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
            model = self.workload.model()
            with torch.random.fork_rng():
                batch = next(iter(self.workload.batches("train", 0, 1, 0)))
            return self.prepare(self.options, model, self.workload.loss, batch)
