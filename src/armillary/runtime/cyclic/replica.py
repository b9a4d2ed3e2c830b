"""One device's copy of a stage that several devices have: the versions of its weights, as they arrive.

Versions are leaf tensors of their own, as in `versions.py`: what arrived is never written to, so graphs may hold it.
The module's own parameters become views of the newest.
"""

from collections.abc import Mapping

from torch import Tensor

from armillary.runtime.cyclic.flat_stage import FlatStage
from armillary.runtime.partition.stages import Stage

__all__ = ["Replica"]


class Replica:
    """Begins with version 0, the weights of the stage."""

    def __init__(self, stage: Stage) -> None:
        named = dict(stage.module.named_parameters())
        self.flat = FlatStage(named)
        self.index, self.newest = stage.index, 0
        self._trained = [name for name, parameter in named.items() if parameter.requires_grad]
        leaves = {name: p.data.requires_grad_(p.requires_grad) for name, p in named.items()}
        self._frozen = {name: leaf for name, leaf in leaves.items() if name not in self._trained}
        self._versions: dict[int, Mapping[str, Tensor]] = {0: leaves}

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that can be read."""
        return tuple(self._versions)

    def at(self, version: int) -> Mapping[str, Tensor]:
        """
        Raises:
            RuntimeError: that version is not there (not yet, or no more); another one is never handed out instead.
        """
        if version not in self._versions:
            raise RuntimeError(
                f"stage {self.index}: version {version} of the weights is missing, there are {self.versions}; the "
                f"schedule was not kept to"
            )
        return self._versions[version]

    def arrive(self, weights: list[Tensor]) -> None:
        """The next version, flat; nobody writes to it any more."""
        self.newest += 1
        parts = self.flat.unpack_weights(weights)
        for parameter, part in zip(self.flat.parameters, parts, strict=True):
            parameter.data = part
        leaves = {name: part.data.requires_grad_() for name, part in zip(self._trained, parts, strict=True)}
        self._versions[self.newest] = {**self._frozen, **leaves}

    def forget(self, before: int) -> None:
        """Drops the versions older than `before`; pending graphs keep what they need."""
        for version in [v for v in self._versions if v < min(before, self.newest)]:
            del self._versions[version]

    def in_order(self, gradients: Mapping[str, Tensor]) -> list[Tensor | None]:
        """Gradients by name in the order of `flat`; None for a parameter that was not used."""
        return [gradients.get(name) for name in self._trained]
