"""The weights of one stage through time: every version still wanted, and how the next one is made, or arrives.

Note [Versions and storage]. A version is a set of leaf tensors of its own, handed to the stage by `functional_call`;
graphs hold these leaves, never the model's parameters. The newest version's leaves share the parameters' storage.
Before the optimizer steps, the parameters get new storage and the leaves keep the old one, so a pending backward never
sees a change; an old version's memory goes when the last graph and this store have dropped it. Only where no backward
is pending and no forward to come reads the newest version do the parameters keep their storage, which saves a copy of
the stage. (`parameter.data = other` is only harmless because no graph holds the parameter; with one that does it
corrupts gradients silently.)

Note [Sums in place]. A step's first gradient becomes the sum, to which the others are added, as in torch's own
accumulation. Torch hands out no tensor that anyone else holds, but two may share memory (the gradients of
`a.view(-1) + b.view(-1)` do), so what one backward made of the same memory is parted. And the sum of the last step is
let go only when the first gradient of this one is there, tensor by tensor: let go all at once, its memory goes back to
the kernel, which clears as many pages anew at every step (46,000 of them, 78 of 290 ms, for a stage of 76 MB).

The model's own parameters always hold the newest version. Buffers are not versioned.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.delayed_step import Options
from armillary.runtime.cyclic.flat_stage import Flats, FlatStage
from armillary.runtime.cyclic.remedied_step import RemediedStep
from armillary.runtime.hybrid.handle import TableHandle

__all__ = ["Means", "StageWeights"]

Weights = Mapping[str, Tensor]  # by the stage's own parameter names
Means = Mapping[nn.Parameter, Tensor]  # gradients, in the order of the stage's parameters
Take = Callable[[int, nn.Parameter, Tensor], None]  # step, parameter, mean gradient


class StageWeights:
    """Begins with version 0; `expect`, `add` and `complete` collect the gradients of a step in micro-batch order,
    `advance` makes a version."""

    def __init__(self, stage: Stage, step: RemediedStep, micro_batches: int, take: Take | None = None) -> None:
        """take: gets each mean as soon as it is final, instead of `complete`; it copies what it gets."""
        self._stage, self._step, self._micro_batches, self._take = stage, step, micro_batches, take
        named = stage.module.named_parameters()  # rows of tables have versions of their own, see `row_versions.py`
        self._parameters = {name: p for name, p in named if not isinstance(p, TableHandle)}
        self.flat = FlatStage(self._parameters)
        self._arrived: Flats | None = None  # the newest version, if another rank made it
        self._versions: dict[int, Weights] = {0: self._leaves()}
        self._ahead: dict[int, Weights] = {}  # versions as they may be a step later, where a remedy says so
        self._sums: dict[str, Tensor] = {}
        self._divided: set[str] = set()  # the sums that are means already
        self._first: list[str] = []  # the sums that this micro-batch began
        self._last_means: dict[str, Tensor] = {}  # of the last step, see Note [Sums in place]
        self._summing, self._added = 0, 0  # step, micro-batches
        self._reading: dict[tuple[int, int], int] = {}  # versions, by step and micro-batch in flight
        self._first_wanted = 0  # version: no forward to come reads an older one
        self.newest = 0

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that can be read."""
        return tuple(self._versions)

    def read(self, step: int, micro_batch: int, version: int) -> Weights:
        """For a forward; its backward may read them, too, until `add` has its gradients.

        Raises:
            RuntimeError: that version is not there (not yet, or no more); another one is never handed out instead.
        """
        if version not in self._versions:
            raise RuntimeError(
                f"stage {self._stage.index}: version {version} of the weights is missing, there are {self.versions}; "
                f"the schedule was not kept to"
            )
        self._reading[step, micro_batch] = version
        return self._ahead.get(version, self._versions[version]) if step > version else self._versions[version]

    def expect(self, step: int, micro_batch: int) -> None:
        """What `add` gets from now on is of that micro-batch.

        Raises:
            RuntimeError: out of order; the sum would differ from the reference's.
        """
        if (step, micro_batch) != (self._summing, self._added):
            raise RuntimeError(
                f"stage {self._stage.index}: gradient of step {step}, micro-batch {micro_batch} came when "
                f"step {self._summing}, micro-batch {self._added} was due"
            )

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds one gradient, by the stage's own name; a parameter that was not used gets none."""
        if name not in self._sums:
            if self._micro_batches == 1 and self._take is not None:  # nothing is added to it
                self._take(self._summing, self._parameters[name], gradient)
                return
            self._sums[name] = gradient
            self._first.append(name)
            self._last_means.pop(name, None)
            return
        self._sums[name].add_(gradient)
        if self._added == self._micro_batches - 1:  # divided while the processor still has it at hand
            self._sums[name].div_(self._micro_batches)
            self._divided.add(name)
            if self._take is not None:
                self._take(self._summing, self._parameters[name], self._sums.pop(name))

    def complete(self, step: int, micro_batch: int, beside: Iterable[Tensor | None] = ()) -> Means | None:
        """The micro-batch has given all. Returns the step's mean gradients, for `advance`, if it was the last; those
        that `take` has got are not among them.

        Args:
            beside: what else the same backward has made, and what it was given.
        """
        self._reading.pop((step, micro_batch), None)
        self._part(beside)
        self._added += 1
        if self._added < self._micro_batches:
            return None
        means = self._means()
        if self._take is not None:
            for parameter, mean in means.items():
                self._take(self._summing, parameter, mean)
            means = {}
        self._summing, self._added = self._summing + 1, 0
        self._sums.clear()
        self._divided.clear()
        return means

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
            self._last_means = {name: gradients[p] for name, p in self._parameters.items() if p in gradients}
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

    def packed(self) -> Flats:
        """The newest version, for another rank."""
        return self.flat.pack_weights(self.flat.parameters) if self._arrived is None else self._arrived

    def _is_wanted(self) -> bool:
        """Whether a forward to come or a pending backward reads the newest version."""
        return self.newest >= self._first_wanted or self.newest in self._reading.values()

    def drain(self) -> None:
        """The next step begins as the first did: it reads nothing old, and no remedy remembers anything."""
        self._ahead.clear()
        self._step.forget()

    def _part(self, beside: Iterable[Tensor | None]) -> None:
        """Copies the new sums whose memory is also another's; see Note [Sums in place]."""
        taken = {_memory(tensor) for tensor in beside if tensor is not None}
        for name in self._first:
            if (memory := _memory(self._sums[name])) in taken:
                self._sums[name] = self._sums[name].clone()
            taken.add(memory)
        self._first.clear()

    def _means(self) -> Means:
        for name in self._sums.keys() - self._divided if self._micro_batches > 1 else ():
            self._sums[name].div_(self._micro_batches)
        return {parameter: self._sums[name] for name, parameter in self._parameters.items() if name in self._sums}

    def forget(self, before: int) -> None:
        """No forward to come reads a version older than `before`; pending graphs keep what they need."""
        self._first_wanted = before
        for version in [v for v in self._versions if v < min(before, self.newest)]:
            del self._versions[version]
            self._ahead.pop(version, None)

    def _leaves(self) -> Weights:
        # .data, not .detach(): with a version counter of its own, see Note [Versions and storage]
        return {name: p.data.requires_grad_(p.requires_grad) for name, p in self._parameters.items()}


def _memory(tensor: Tensor) -> int:
    """What tells the memory of one tensor from another's. Only dense tensors are changed in place."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
