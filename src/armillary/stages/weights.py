"""The weights of one stage through time: every version still wanted, and how the next one is made, or arrives.

Note [Versions and storage]. A version is a set of leaf tensors of its own, that stand in the stage meanwhile;
graphs hold these leaves, never the model's parameters. The newest version's leaves share the parameters' storage.
Before the optimizer steps, the parameters get new storage and the leaves keep the old one, so a pending backward never
sees a change; an old version's memory goes when the last graph and this store have dropped it. Only where no backward
is pending and no forward to come reads the newest version do the parameters keep their storage, which saves a copy of
the stage. (`parameter.data = other` is only harmless because no graph holds the parameter; with one that does it
corrupts gradients silently.)

The model's own parameters always hold the newest version. Buffers are not versioned.

Weights of a stage that another rank owns: here while an action reads them, and until they have been handed on.

Graphs keep none of them. What autograd saves of a weight in forward is noted as a place in the stage's flat tensors,
and looked up in backward, when the same version is here again. The leaves that a graph holds, and the model's own
parameters, keep their shape and hold NaN in one element, so that a reader out of turn does not go on unnoticed.

A cast of a weight (autocast) is a tensor of its own, which autograd keeps from forward to backward.

What is here for a time where weights are lent, in the mean over actions: borrowed, older, and on its way.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from armillary.schedules.instructions import StageMessage
from armillary.stages.optimizer_step import CorrectedStep, Options
from armillary.stages.partition import Stage
from armillary.stages.reducer import Flats, FlatStage, Means

__all__ = ["LentBytes", "StageWeights", "UnshardedStage", "UnshardedWeights", "Weights"]

Weights = Mapping[str, Tensor]  # by the stage's own parameter names


def _let_go(gradients: Means) -> None:
    """They are not looked at again."""


class StageWeights:
    """Begins with version 0; `advance` makes the next, or it arrives.

    Args:
        keep: gets the gradients with which the optimizer has stepped.
    """

    def __init__(self, stage: Stage, step: CorrectedStep, keep: Callable[[Means], None] = _let_go) -> None:
        self._stage, self._step, self._keep = stage, step, keep
        self._parameters = dict(stage.module.named_parameters())
        self.flat = FlatStage(self._parameters)
        self._arrived: Flats | None = None  # the newest version, if another rank made it
        self._versions: dict[int, Weights] = {0: self._leaves()}
        self._ahead: dict[int, Weights] = {}  # versions as they may be a step later, where a correction says so
        self._reading: dict[tuple[int, int], int] = {}  # versions, by step and micro-batch in flight
        self._first_wanted = 0  # version: no forward to come reads an older one
        self.newest = 0

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that can be read."""
        return tuple(self._versions)

    def read(self, step: int, micro_batch: int, version: int) -> Weights:
        """For a forward; its backward may read them, too, until it has `landed`.

        Raises:
            RuntimeError: that version is not there (not yet, or no more); another one is never handed out instead.
        """
        weights = self.at(version)
        self._reading[step, micro_batch] = version
        return self._ahead.get(version, weights) if step > version else weights

    def at(self, version: int) -> Weights:
        """One that is there; see `read`."""
        if version not in self._versions:
            raise RuntimeError(
                f"stage {self._stage.index}: version {version} of the weights is missing, there are {self.versions}; "
                f"the schedule was not kept to"
            )
        return self._versions[version]

    def landed(self, step: int, micro_batch: int) -> None:
        """Its backward is done."""
        self._reading.pop((step, micro_batch), None)

    def advance(self, gradients: Means, options: Options) -> None:
        """Steps the optimizer with the gradients of step `newest`: version `newest` + 1 is there then."""
        if self._is_wanted():
            for parameter in self._parameters.values():
                parameter.data = parameter.data.clone()  # see Note [Versions and storage]
        else:
            del self._versions[self.newest]
            self._ahead.pop(self.newest, None)
        self._step.step(gradients, options)
        if not self._step.keeps_gradients:
            self._keep(gradients)
        self.newest += 1
        self._versions[self.newest] = self._leaves()
        if ahead := self._step.ahead(self._parameters, options):
            self._ahead[self.newest] = ahead

    def arrive(self, flats: Flats) -> None:
        """The next version comes from the rank that made it; nobody changes its tensors."""
        if not self._is_wanted():
            del self._versions[self.newest]
        for parameter, weight in zip(self.flat.parameters, self.flat.unpack_weights(flats), strict=True):
            parameter.data = weight
        self.newest += 1
        self._versions[self.newest], self._arrived = self._leaves(), flats

    def packed(self, version: int) -> Flats:
        """A version, for another rank: a copy, if it was made here."""
        if self._arrived is not None and version == self.newest:
            return self._arrived
        weights = self.at(version)
        return self.flat.pack_weights([weight for weight in weights.values() if weight.requires_grad])

    def older(self) -> Iterator[Tensor]:
        """What is held of versions before the newest."""
        yield from (one for v, weights in self._versions.items() if v < self.newest for one in weights.values())

    def _is_wanted(self) -> bool:
        """Whether a forward to come or a pending backward reads the newest version."""
        return self.newest >= self._first_wanted or self.newest in self._reading.values()

    def drain(self) -> None:
        """The next step begins as the first did: it reads nothing old, and no correction remembers anything."""
        self._ahead.clear()
        self._step.forget()

    def forget(self, before: int) -> None:
        """No forward to come reads a version older than `before`; pending graphs keep what they need."""
        self._first_wanted = before
        for version in [v for v in self._versions if v < min(before, self.newest)]:
            del self._versions[version]
            self._ahead.pop(version, None)

    def _leaves(self) -> Weights:
        # .data, not .detach(): with a version counter of its own, see Note [Versions and storage]
        return {name: p.data.requires_grad_(p.requires_grad) for name, p in self._parameters.items()}


class UnshardedStage:
    """Of one stage. Parameters that are not trained are everybody's own."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._parameters = dict(stage.module.named_parameters())
        self.flat = FlatStage(self._parameters)
        self._here: dict[tuple[str, int], Flats] = {}  # by what they are for, and version
        self.blank()

    def blank(self) -> None:
        """The model's own parameters hold no weights."""
        for parameter in self.flat.parameters:
            parameter.data = _blank(parameter)

    def arrive(self, message: StageMessage, flats: Flats) -> None:
        self._here[message.what, message.version] = flats

    def let_go(self, message: StageMessage) -> None:
        del self._here[message.what, message.version]

    def read(self, version: int) -> "UnshardedWeights":
        """For a forward and its backward."""
        leaves = {
            name: _blank(p).requires_grad_() if p.requires_grad else p.data for name, p in self._parameters.items()
        }
        return UnshardedWeights(leaves, self, version)

    def flats_for(self, what: str, version: int) -> Flats:
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


class UnshardedWeights:
    """What one micro-batch reads of it: `here` once around its forward, once around its backward.

    weights: leaves, by the stage's own names.
    """

    def __init__(self, leaves: Mapping[str, Tensor], borrowed: UnshardedStage, version: int) -> None:
        self.weights: Weights = leaves
        self._borrowed, self._version = borrowed, version
        self._leaves = [leaf for leaf in leaves.values() if leaf.requires_grad]
        self._what: str = "forward weights"
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


class LentBytes:
    """
    Args:
        tensors: those that are here now.
    """

    def __init__(self, tensors: Callable[[], Iterator[Tensor]]) -> None:
        self._tensors, self._sum, self._looks = tensors, 0, 0

    def look(self) -> None:
        """An action is about to run."""
        storages = [tensor.untyped_storage() for tensor in self._tensors()]
        self._sum += sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        self._looks += 1

    @property
    def mean(self) -> float:
        return self._sum / max(1, self._looks)
