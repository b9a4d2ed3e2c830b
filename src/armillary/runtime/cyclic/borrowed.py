"""Weights of a stage that another rank owns: here while an action reads them, and until they have been handed on.

Graphs keep none of them. What autograd saves of a weight in forward is noted as a place in the stage's flat tensors,
and looked up in backward, when the same version is here again. The leaves that a graph holds, and the model's own
parameters, keep their shape and hold NaN in one element, so that a reader out of turn does not go on unnoticed.

A cast of a weight (autocast) is a tensor of its own, which autograd keeps from forward to backward.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from armillary.runtime.cyclic.flat_stage import Flats, FlatStage
from armillary.runtime.cyclic.versions import Weights
from armillary.runtime.partition.stages import Stage
from armillary.schedules.instruction import Letter, What

__all__ = ["Borrowed", "Borrowing"]


class Borrowed:
    """Of one stage. Parameters that are not trained are everybody's own."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._parameters = dict(stage.module.named_parameters())
        self.flat = FlatStage(self._parameters)
        self._here: dict[tuple[What, int], Flats] = {}  # by what they are for, and version
        self.blank()

    def blank(self) -> None:
        """The model's own parameters hold no weights."""
        for parameter in self.flat.parameters:
            parameter.data = _blank(parameter)

    def arrive(self, letter: Letter, flats: Flats) -> None:
        self._here[letter.what, letter.version] = flats

    def let_go(self, letter: Letter) -> None:
        del self._here[letter.what, letter.version]

    def read(self, version: int) -> "Borrowing":
        """For a forward and its backward."""
        leaves = {
            name: _blank(p).requires_grad_() if p.requires_grad else p.data for name, p in self._parameters.items()
        }
        return Borrowing(leaves, self, version)

    def flats_for(self, what: What, version: int) -> Flats:
        """
        Raises:
            RuntimeError: that version is not here; another one is never handed out instead.
        """
        if (what, version) not in self._here:
            raise RuntimeError(
                f"stage {self.stage.index}: version {version} of the {what} is missing, there are {[*self._here]}; "
                f"the schedule was not kept to"
            )
        return self._here[what, version]

    def held(self) -> Iterator[Tensor]:
        """All that is here."""
        yield from (flat for flats in self._here.values() for flat in flats)


class _Spot(NamedTuple):
    """A part of a stage's weights: which of the flat tensors, and where in it."""

    flat: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Borrowing:
    """What one micro-batch reads of it: `here` once around its forward, once around its backward.

    weights: leaves, by the stage's own names.
    """

    def __init__(self, leaves: Mapping[str, Tensor], borrowed: Borrowed, version: int) -> None:
        self.weights: Weights = leaves
        self._borrowed, self._version = borrowed, version
        self._leaves = [leaf for leaf in leaves.values() if leaf.requires_grad]
        self._what: What = "forward weights"
        self._flats: Flats = []  # that are here
        self._places: dict[int, int] = {}  # storage -> which of them

    @contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the leaves are views of what has come, and graphs keep none of it. A forward that runs again for its
        backward is inside already."""
        if self._flats:
            yield
            return
        self._flats = self._borrowed.flats_for(self._what, self._version)
        self._places = {flat.untyped_storage().data_ptr(): place for place, flat in enumerate(self._flats)}
        for leaf, weight in zip(self._leaves, self._borrowed.flat.unpack_weights(self._flats), strict=True):
            leaf.data = weight
        try:
            with saved_tensors_hooks(self._note, self._look_up):
                yield
        finally:
            for leaf in self._leaves:
                leaf.data = _blank(leaf)
            self._flats, self._places, self._what = [], {}, "backward weights"

    def _note(self, saved: Tensor) -> Any:
        """What a graph keeps instead of a tensor: where it lies in the stage's weights, if it is part of them."""
        place = self._places.get(saved.untyped_storage().data_ptr())
        if place is None:
            return saved.detach()  # an output that is kept itself would keep its graph alive
        return _Spot(place, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def _look_up(self, noted: Any) -> Tensor:
        if not isinstance(noted, _Spot):
            kept: Tensor = noted
            return kept
        return self._flats[noted.flat].as_strided(noted.size, noted.stride, noted.offset)


def _blank(like: Tensor) -> Tensor:
    return like.data.new_full((), torch.nan).expand(like.shape)
