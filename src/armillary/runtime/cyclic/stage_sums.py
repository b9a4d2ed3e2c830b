"""Gradients of one stage on their way to its optimizer, step by step: those made here, and sums with other ranks'.

Where several ranks run a stage, a flat sum with counts goes from one to the next (`flat_stage.py`): what arrives is
added to in place, and a rank that is the first packs its own. The sum is divided once, where it is whole.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from armillary.runtime.cyclic.flat_stage import Flats, FlatStage
from armillary.runtime.cyclic.shared_gradients import SharedGradients
from armillary.runtime.cyclic.step_means import Means
from armillary.schedules.clipping import square_of_stage
from armillary.schedules.instruction import Letter

__all__ = ["StageSums"]


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

    def join(self, letter: Letter, came: Flats) -> None:
        """Gradients of another rank, or the sum of several, with what is here. Of what stages share: a copy's are
        added to those here, or their sum takes the place of the copy's here."""
        step = letter.step
        if letter.what in ("copy's gradient", "shared gradient"):
            shared, own = self._shared[letter.stage], self._whole(step)
            found = shared.added(own, came) if letter.what == "copy's gradient" else shared.replaced(own, came)
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

    def shared(self, letter: Letter) -> Flats:
        """What is here of the parameters that another stage shares."""
        return self._shared[letter.stage].packed(self._whole(letter.step))

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
