"""A plain training step, which the hooks of a runtime follow."""

from torch import Tensor

from armillary.runtime.cyclic.autocast import without_autocast
from armillary.session.train_job import TrainJob
from armillary.session.workload import Batch

__all__ = ["forward", "learn"]


def forward(job: TrainJob, batch: Batch) -> Tensor:
    """The loss."""
    assert job.loss is not None
    return job.loss(job.model, batch)


def learn(job: TrainJob, value: Tensor) -> None:
    """Backward and the optimizer's step."""
    with without_autocast(value.device.type):
        value.backward()
        job.optimizer.step()
