"""Stages whose weights are lent to this process: looks at the whole model; what reads it out of turn is refused."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from armillary.runtime.cyclic.borrowed import Borrowed
from armillary.runtime.partition.stages import Stage

__all__ = ["LentStages"]


class LentStages:
    """From construction to `detach` a module that reads weights which are not here is refused.

    Args:
        stages: of the whole model, cut. borrowed: those of them that others own.
        spread: collective; overwrites a tensor with that of a process.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage],
        borrowed: Mapping[int, Borrowed],
        spread: Callable[[Tensor, int], None],
    ) -> None:
        self._stages, self._borrowed, self._spread = stages, borrowed, spread
        self._is_whole = False
        self._owner = {id(p): j for j, one in borrowed.items() for p in one.flat.parameters}
        self._hooks = [hook for path, module in model.named_modules() for hook in self._watched(path, module)]

    def _watched(self, path: str, module: nn.Module) -> Iterator[Any]:
        if any(id(p) in self._owner for p in module.parameters(recurse=False)):
            yield module.register_forward_pre_hook(lambda module, given: self._refuse_blank(path, module))

    def _refuse_blank(self, path: str, module: nn.Module) -> None:
        """
        Raises:
            RuntimeError: it reads the model's own parameters, which hold nothing, instead of what has been lent.
        """
        read = sorted({self._owner[id(p)] for p in module.parameters(recurse=False) if id(p) in self._owner})
        if read and not self._is_whole:
            raise RuntimeError(
                f"schedule: {path or 'the model'} reads weights of stage {read[0]}, which are not here: this process "
                f"holds those that it owns, and others only while a step uses them. Use run.evaluate or "
                f"run.export, or take a schedule that keeps all weights on every process"
            )

    @contextmanager
    def whole(self, owners: Sequence[int]) -> Iterator[None]:
        """Collective; inside, every process has the weights of all stages.

        Args:
            owners: by stage.
        """
        for borrowed in self._borrowed.values():
            for parameter in borrowed.flat.parameters:
                parameter.data = parameter.data.new_empty(parameter.shape)
        with torch.no_grad():
            for stage in self._stages:
                for parameter in (p for p in stage.module.parameters() if p.requires_grad):
                    self._spread(parameter, owners[stage.index])
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            for borrowed in self._borrowed.values():
                borrowed.blank()

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
