"""A workload that trains under a plan: the step that is timed."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from armillary import Plan
from armillary.session.attach import attach_over
from armillary.session.job import TrainJob
from armillary.session.workload import Workload
from armillary.transport.transport import Transport
from benchmarks.measuring.measure import Step

__all__ = ["trained"]


def trained(workload: Workload, plan: Plan | None, batches: Sequence[Any], transport: Transport) -> Step:
    """A new model under that plan; without one it learns alone, and only waits for the others. `batches` come round.
    All plans use one `transport`, as a job that trains has one: idle threads of others would wake in every turn."""
    torch.manual_seed(0)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    run = None if plan is None else attach_over(transport, plan, TrainJob(model, optimizer), owns_transport=False)
    stream = cycle(batches)

    def step() -> float:
        batch = next(stream)
        optimizer.zero_grad(set_to_none=True)
        loss = workload.loss(model, batch)
        value = float(loss.detach())
        loss.backward()
        optimizer.step()
        if run is None:
            dist.barrier()
        return value

    return step
