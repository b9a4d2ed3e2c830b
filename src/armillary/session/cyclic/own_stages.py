"""The stages that a process keeps; the parameters of the others are empty, but for looks at the whole model."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from armillary.runtime.hybrid.handle import TableHandle
from armillary.runtime.partition.stages import Stage
from armillary.runtime.transport import Transport

__all__ = ["OwnStages", "held_whole"]


def held_whole(stage: Stage) -> list[nn.Parameter]:
    """The parameters of a stage whose rows are not spread over the processes."""
    return [p for p in stage.module.parameters() if not isinstance(p, TableHandle)]


class OwnStages:
    """
    Args:
        stages: of the whole model.
        kept: numbers of those kept here.
    """

    def __init__(self, stages: Sequence[Stage], kept: Collection[int], transport: Transport) -> None:
        self._stages, self._transport = stages, transport
        others = [stage for stage in stages if stage.index not in kept]
        self._buffers = [b for stage in stages if stage.index in kept for b in stage.module.buffers()]
        self._away = [(p, p.shape) for stage in others for p in held_whole(stage)]
        self._empty()

    @contextmanager
    def whole(self, owners: Sequence[int], keepers: Sequence[int]) -> Iterator[None]:
        """Collective; inside, every process has the whole model.

        Args:
            owners: by stage, the process whose parameters everybody gets.
            keepers: by stage, the process whose buffers; a process has its own again afterwards.
        """
        mine = [buffer.clone() for buffer in self._buffers]
        for parameter, shape in self._away:
            parameter.data = parameter.data.new_empty(shape)
        with torch.no_grad():
            for stage in self._stages:
                for parameter in held_whole(stage):
                    self._transport.spread(parameter, owners[stage.index])
                for buffer in stage.module.buffers():
                    self._transport.spread(buffer, keepers[stage.index])
        try:
            yield
        finally:
            for buffer, kept in zip(self._buffers, mine, strict=True):
                buffer.copy_(kept)
            self._empty()

    def _empty(self) -> None:
        for parameter, _ in self._away:
            parameter.data = parameter.data.new_empty(0)
