"""The mean gradient of one stage over the micro-batches of a step that run here, collected in their order.

Note [Sums in place]. A step's first gradient becomes the sum, to which the others are added, as in torch's own
accumulation. Torch hands out no tensor that anyone else holds, but two may share memory (the gradients of
`a.view(-1) + b.view(-1)` do), so what one backward made of the same memory is parted. And the sum of the last step is
let go only when the first gradient of this one is there, tensor by tensor: let go all at once, its memory goes back to
the kernel, which clears as many pages anew at every step (46,000 of them, 78 of 290 ms, for a stage of 76 MB).
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

__all__ = ["Means", "StepMeans"]

Means = Mapping[nn.Parameter, Tensor]  # gradients, in the order of the stage's parameters
Take = Callable[[int, nn.Parameter, Tensor], None]  # step, parameter, mean gradient


class StepMeans:
    """`expect`, `add` and `complete` collect the gradients of a step in micro-batch order.

    Args:
        stage: its number. parameters: by the stage's own names.
        take: gets each mean as soon as it is final, instead of `complete`; it copies what it gets.
    """

    def __init__(
        self, stage: int, parameters: Mapping[str, nn.Parameter], micro_batches: int, take: Take | None = None
    ) -> None:
        self._stage, self._parameters, self._micro_batches, self._take = stage, parameters, micro_batches, take
        self._sums: dict[str, Tensor] = {}
        self._divided: set[str] = set()  # the sums that are means already
        self._first: list[str] = []  # the sums that this micro-batch began
        self._last_means: dict[str, Tensor] = {}  # of the last step, see Note [Sums in place]
        self._summing, self._added = 0, 0  # step, micro-batches
        self._last = (-1, -1)  # step and micro-batch that came last

    def expect(self, step: int, micro_batch: int) -> None:
        """What `add` gets from now on is of that micro-batch. Where each is a sum of its own, some come to other ranks.

        Raises:
            RuntimeError: out of order; the sum would differ from the reference's.
        """
        place, due = (step, micro_batch), (self._summing, self._added)
        if self._micro_batches == 1:
            is_out, wanted = place <= self._last, f"a later one than {self._last} was"
        else:
            is_out, wanted = place != due, f"step {self._summing}, micro-batch {self._added} was"
        if is_out:
            raise RuntimeError(
                f"stage {self._stage}: gradient of step {step}, micro-batch {micro_batch} came when {wanted} due"
            )
        self._summing, self._last = step, place

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

    def complete(self, beside: Iterable[Tensor | None] = ()) -> Means | None:
        """The micro-batch has given all. Returns the step's means if it was the last, without those that `take` got.

        Args:
            beside: what else the same backward has made, and what it was given.
        """
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

    def keep(self, means: Means) -> None:
        """Those of the last step, with which the optimizer has stepped; see Note [Sums in place]."""
        self._last_means = {name: means[p] for name, p in self._parameters.items() if p in means}

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


def _memory(tensor: Tensor) -> int:
    """What tells the memory of one tensor from another's. Only dense tensors are changed in place."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
