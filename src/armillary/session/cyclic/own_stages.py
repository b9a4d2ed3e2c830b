"""The stages that a process keeps; the parameters of the others are empty, but for looks at the whole model."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from armillary.runtime.partition.stages import Stage, ties_of
from armillary.runtime.transport import Transport

__all__ = ["OwnStages", "share_first"]


def share_first(stages: Sequence[Stage], owners: Sequence[int], transport: Transport) -> None:
    """Collective, before the first step: copies of what stages share are their owner's. owners: by stage, its rank."""
    for tie in ties_of(stages).values():
        for parameter in tie.parameters.values():
            transport.spread(parameter, owners[tie.owner])


def _first_held(stages: Sequence[Stage], stage: Stage) -> list[nn.Parameter]:
    """What no stage before holds, too."""
    before = {id(p) for one in stages[: stage.index] for p in one.module.parameters()}
    return [p for p in stage.module.parameters() if id(p) not in before]


class OwnStages:
    """
    Args:
        stages: of the whole model.
        kept: numbers of those kept here.
    """

    def __init__(self, stages: Sequence[Stage], kept: Collection[int], transport: Transport) -> None:
        self._stages, self._transport = stages, transport
        mine = {id(p) for stage in stages if stage.index in kept for p in stage.module.parameters()}
        self._buffers = [b for stage in stages if stage.index in kept for b in stage.module.buffers()]
        self._held = {stage.index: _first_held(stages, stage) for stage in stages}
        self._away = [(p, p.shape) for held in self._held.values() for p in held if id(p) not in mine]
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
                for parameter in self._held[stage.index]:
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
