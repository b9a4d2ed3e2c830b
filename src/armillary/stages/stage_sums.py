"""Gradients of one stage on their way to its optimizer, step by step: those made here, and sums with other ranks'.

Where several ranks run a stage, a flat sum with counts goes from one to the next (`flat_stage.py`): what arrives is
added to in place, and a rank that is the first packs its own. The sum is divided once, where it is whole.

Ranks that carry out one schedule side by side, each on micro-batches of its own: data parallelism around a schedule.

When a stage's gradients of a step are complete here they are everywhere, in the order of the same table; their mean
over the ranks is a `Reducer`'s.

Gradients of parameters that two stages share: those of the copy, and the sum that takes their place.

The stage that owns the parameters adds a copy's gradients to its own, in place. Copies arrive with a count for every
parameter (`flat_stage.py`), so one that neither stage used gets no gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from armillary.plans.parcel import RankInfo
from armillary.plans.requests import Scope
from armillary.runtime.dense_unit import DenseUnit
from armillary.schedules.clipping import square_of_stage
from armillary.schedules.instructions import StageMessage
from armillary.stages.partition import Tie
from armillary.stages.reducer import Flats, FlatStage, Means, Reducer
from armillary.transport.requests import Requests

__all__ = ["SharedGradients", "StageReplicas", "StageSums", "alone", "shared_gradients"]


@dataclass(frozen=True, eq=False)
class StageReplicas:
    """
    Args:
        place: of this rank among them. requests: to the others; None if there are none. scope: that names them.
        groups: by stage, in the plan's order; each holds parameters of one dtype.
    """

    place: RankInfo
    requests: Requests | None = None
    scope: Scope = "world"
    groups: Mapping[int, Sequence[DenseUnit]] = field(default_factory=dict)

    @property
    def reduces(self) -> bool:
        """Whether gradients cross: to others, or what an exchange kept of earlier ones arrives here."""
        units = (unit for those in self.groups.values() for unit in those)
        return self.place.workers > 1 or any(unit.exchange.is_guarded for unit in units)

    def reducer(self, stage: int, is_late: bool) -> Reducer:
        """Of the stage's gradients.

        Args:
            is_late: whether a step's mean is wanted only when the next step's gradients are there.
        """
        assert self.requests is not None
        units = self.groups.get(stage, ())
        for unit in units if is_late else ():
            unit.double()
        return Reducer(units, self.place, self.requests, self.scope)


def alone() -> StageReplicas:
    """One rank."""
    return StageReplicas(RankInfo(0, 1))


@dataclass(frozen=True, eq=False)
class SharedGradients:
    """
    Args:
        owner: the stage that owns them. flat: as they travel.
    """

    owner: int
    flat: FlatStage

    def packed(self, means: Means) -> Flats:
        """Those of the shared parameters."""
        return self.flat.pack_gradients([means.get(parameter) for parameter in self.flat.parameters])

    def added(self, means: Means, came: Flats) -> Means:
        """At the owner: with a copy's."""
        found = dict(means)
        for place, gradient in self.flat.unpack_gradients(came).items():
            parameter = self.flat.parameters[place]
            found[parameter] = found[parameter] + gradient if parameter in found else gradient
        return found

    def replaced(self, means: Means, came: Flats) -> Means:
        """At a copy: by the sums."""
        sums = self.flat.unpack_gradients(came)
        return {**means, **{self.flat.parameters[place]: gradient for place, gradient in sums.items()}}

    def without(self, means: Means) -> Means:
        """What the stage does not share."""
        shared = {*self.flat.parameters}
        return {parameter: mean for parameter, mean in means.items() if parameter not in shared}


def shared_gradients(ties: Mapping[int, Tie]) -> dict[int, SharedGradients]:
    """By the stage that holds copies."""
    return {stage: SharedGradients(tie.owner, FlatStage(tie.parameters)) for stage, tie in ties.items()}


class StageSums:
    """
    Args:
        flat: the stage's layout.
        ranks: that make a sum together; each has divided by the number of its own micro-batches.
        shared: what stages share, by the one that has copies. The other counts them in its norm.
        stage: the number of this one.
    """

    def __init__(
        self, flat: FlatStage, ranks: int, shared: Mapping[int, SharedGradients] = MappingProxyType({}), stage: int = 0
    ) -> None:
        self._flat, self._ranks, self._shared, self._copies = flat, ranks, shared, shared.get(stage)
        self._own: dict[int, Means] = {}  # by step
        self._coming: dict[int, Callable[[], Means]] = {}  # means over replicas
        self._sums: dict[int, Flats] = {}

    def put(self, step: int, means: Means) -> None:
        """This rank's gradients of a step."""
        self._own[step] = means

    def expect(self, step: int, mean: Callable[[], Means]) -> None:
        """Their mean over replicas is on its way; `mean` waits for it."""
        self._coming[step] = mean

    def _landed(self, step: int) -> None:
        if step in self._coming:
            found = self._coming.pop(step)()
            self._own[step] = {p: found[p] for p in self._flat.parameters if p in found}

    def join(self, message: StageMessage, came: Flats) -> None:
        """Gradients of another rank, or the sum of several, with what is here. Of what stages share: a copy's are
        added to those here, or their sum takes the place of the copy's here."""
        step = message.step
        if message.what in ("copy's gradient", "shared gradient"):
            shared, own = self._shared[message.stage], self._whole(step)
            found = shared.added(own, came) if message.what == "copy's gradient" else shared.replaced(own, came)
            self._own[step] = {p: found[p] for p in self._flat.parameters if p in found}
            return
        if step in self._own:
            own = self._own.pop(step)
            self._flat.add_gradients(came, [own.get(parameter) for parameter in self._flat.parameters])
        elif step in self._sums:
            came = [flat.add_(more) for flat, more in zip(self._sums[step], came, strict=True)]
        self._sums[step] = came

    def packed(self, step: int) -> Flats:
        """What is here, for another rank; it is taken away."""
        if step in self._sums:
            return self._sums.pop(step)
        own = self._own.pop(step)
        return self._flat.pack_gradients([own.get(parameter) for parameter in self._flat.parameters])

    def shared(self, message: StageMessage) -> Flats:
        """What is here of the parameters that another stage shares."""
        return self._shared[message.stage].packed(self._whole(message.step))

    def _whole(self, step: int) -> Means:
        """This rank's, when all is here."""
        self._landed(step)
        return self._own[step]

    def square(self, step: int) -> Tensor:
        """Of the norm of the mean, when all is here."""
        self._landed(step)
        if step in self._own:
            own = self._own[step]
            return square_of_stage((own if self._copies is None else self._copies.without(own)).values())
        found = self._flat.unpack_gradients(self._sums[step])
        return square_of_stage(found[place] / self._ranks for place in sorted(found))

    def mean(self, step: int) -> Means:
        """When all is here; it is taken away."""
        self._landed(step)
        if step not in self._sums:
            return self._own.pop(step)
        found = self._flat.unpack_gradients(self._sums.pop(step))
        with torch.no_grad():
            return {self._flat.parameters[place]: found[place].div_(self._ranks) for place in sorted(found)}
