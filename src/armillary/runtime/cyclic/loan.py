"""Weights on loan: a model's parameters hold those of one stage at a time, and graphs keep none of them.

What autograd saves of a weight in forward is noted as a place in the stage's flat tensors, and looked up in backward,
when the same version is here again. Parameters not on loan keep their shape and hold NaN in one element, so that a
reader out of turn does not go on unnoticed.

A cast of a weight (autocast) is a tensor of its own, which autograd keeps from forward to backward.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.runtime.cyclic.flat_stage import Flats, FlatStage

__all__ = ["Loan"]


class _Spot(NamedTuple):
    """A part of a stage's weights: which of the flat tensors, and where in it."""

    stage: int
    flat: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Loan:
    """
    Args:
        fetch: called with a stage, inside backward, before its weights are looked up; it has them lent.

    stage: whose weights are here; None between two actions.
    """

    def __init__(self, stages: Mapping[int, FlatStage], fetch: Callable[[int], None]) -> None:
        self.stage: int | None = None
        self.flats: Flats = []
        self._is_whole = False  # for a look
        self._stages, self._fetch = stages, fetch
        self._spots: dict[int, int] = {}  # storage -> which of the flat tensors
        for stage in stages:
            self._blank(stage)

    def has(self, stage: int) -> bool:
        """Whether a stage's weights are here."""
        return self._is_whole or stage == self.stage

    def lend(self, stage: int, flats: Flats) -> None:
        """The parameters of a stage become views of `flats`; those of the stage before are blank again.

        Raises:
            RuntimeError: while the whole model is looked at.
        """
        if self._is_whole:
            raise RuntimeError("stages: a training forward inside newest(); train outside of it")
        self.end()
        for parameter, weight in zip(self._stages[stage].parameters, self._stages[stage].unpack_weights(flats)):
            parameter.data = weight
        self.stage, self.flats = stage, flats
        self._spots = {flat.untyped_storage().data_ptr(): place for place, flat in enumerate(flats) if flat.numel()}
        torch.clear_autocast_cache()  # it would go on handing out casts of the weights before

    def end(self) -> None:
        """Nothing is on loan."""
        if self.stage is not None:
            self._blank(self.stage)
        self.stage, self.flats, self._spots = None, [], {}

    @contextmanager
    def look(self, flats: Mapping[int, Flats]) -> Iterator[None]:
        """Inside, the parameters of all stages are views of `flats`."""
        for stage, whole in flats.items():
            for parameter, weight in zip(self._stages[stage].parameters, self._stages[stage].unpack_weights(whole)):
                parameter.data = weight
        self._is_whole = True
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            self._is_whole = False
            for stage in flats:
                self._blank(stage)
            torch.clear_autocast_cache()

    def note(self, saved: Tensor) -> Any:
        """What a graph keeps instead of a tensor: where it lies in the stage's weights, if it is part of them."""
        place = self._spots.get(saved.untyped_storage().data_ptr())
        if place is None or self.stage is None:
            return saved.detach()  # an output that is kept itself would keep its graph alive
        return _Spot(self.stage, place, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def look_up(self, noted: Any) -> Tensor:
        """
        Raises:
            RuntimeError: the stage's weights are not here.
        """
        if not isinstance(noted, _Spot):
            kept: Tensor = noted
            return kept
        self._fetch(noted.stage)
        if self.stage != noted.stage:
            raise RuntimeError(
                f"stages: backward reads weights of stage {noted.stage} while those of stage {self.stage} are here; "
                f"a backward goes once through the stages, last to first (no retain_graph)"
            )
        return self.flats[noted.flat].as_strided(noted.size, noted.stride, noted.offset)

    def _blank(self, stage: int) -> None:
        for parameter in self._stages[stage].parameters:
            parameter.data = parameter.data.new_full((), torch.nan).expand(parameter.shape)
