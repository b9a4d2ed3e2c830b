"""Gradients of parameters that two stages share: those of the copy, and the sum that takes their place.

The stage that owns the parameters adds a copy's gradients to its own, in place. Copies arrive with a count for every
parameter (`flat_stage.py`), so one that neither stage used gets no gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from armillary.runtime.cyclic.flat_stage import Flats, FlatStage
from armillary.runtime.cyclic.step_means import Means
from armillary.runtime.partition.stages import Tie

__all__ = ["SharedGradients", "shared_gradients"]


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
