"""The weights of one stage through time: every version still wanted, and how the next one is made, or arrives.

Note [Versions and storage]. A version is a set of leaf tensors of its own, that stand in the stage meanwhile;
graphs hold these leaves, never the model's parameters. The newest version's leaves share the parameters' storage.
Before the optimizer steps, the parameters get new storage and the leaves keep the old one, so a pending backward never
sees a change; an old version's memory goes when the last graph and this store have dropped it. Only where no backward
is pending and no forward to come reads the newest version do the parameters keep their storage, which saves a copy of
the stage. (`parameter.data = other` is only harmless because no graph holds the parameter; with one that does it
corrupts gradients silently.)

The model's own parameters always hold the newest version. Buffers are not versioned.
"""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from armillary.runtime.cyclic.corrected_step import CorrectedStep
from armillary.runtime.cyclic.delayed_step import Options
from armillary.runtime.cyclic.flat_stage import Flats, FlatStage
from armillary.runtime.cyclic.step_means import Means
from armillary.runtime.partition.stages import Stage

__all__ = ["StageWeights", "Weights"]

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
