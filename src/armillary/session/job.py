"""What evaluation and clocks need of a run, whatever carries it out."""

from typing import Protocol

from torch import nn

from armillary.runtime.transport import Transport

__all__ = ["Job"]


class Job(Protocol):
    """This process's part of a training job."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def rank(self) -> int: ...

    @property
    def workers(self) -> int: ...

    def finish(self) -> None:
        """Waits for all processes, and serves them meanwhile."""
