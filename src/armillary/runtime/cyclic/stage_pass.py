"""Forward and backward of one stage for one micro-batch, cut off from its neighbours.

A stage's inputs are leaves, so its graph ends at its edges; gradients cross the edges by hand. Values and gradients
cross in one layout (`schedules/layout.py`), whatever made them. What a flight keeps between forward and backward is
what the schedule counts as one held activation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from armillary.facts.autocast import Autocast
from armillary.runtime.cyclic.borrowed import Borrowing
from armillary.runtime.cyclic.stage_inputs import StageInputs
from armillary.runtime.cyclic.versions import Weights
from armillary.runtime.partition.found_buffers import Found
from armillary.runtime.partition.stages import Stage
from armillary.schedules.layout import plain
from armillary.schedules.random_stream import RandomStream, seeded

__all__ = ["Landed", "OwnLoss", "Reads", "StageActivation", "Value", "detached", "forward_stage"]

Gradients = list[Tensor | None]  # one per leaf of a value
Take = Callable[[str, Tensor], None]  # gets a weight's name and its gradient; a weight that was not used has none


@dataclass(frozen=True, eq=False)
class Value:
    """A nest of tensors, taken apart: what crosses from one stage to the next. passed_on: numbers of the leaves that go
    out as they came in."""

    leaves: list[Any]
    spec: TreeSpec
    passed_on: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Reads:
    """What a forward reads of the model: weights of one version, by the stage's own names. borrowed: where the weights
    are here for one action at a time."""

    version: int
    weights: Weights
    borrowed: Borrowing | None = None

    def here(self) -> AbstractContextManager[None]:
        """Around an action that reads the weights."""
        return nullcontext() if self.borrowed is None else self.borrowed.here()


@dataclass(frozen=True, eq=False)
class Landed:
    """What a backward leaves beside the gradients of weights: those of the value that came in; and all that may lie in
    the same memory as the weights', which are those of the value, and of the value that went out."""

    value: Gradients
    beside: Gradients


@dataclass(frozen=True, eq=False)
class StageActivation:
    """A stage between forward and backward. `again` makes the outputs once more if they were not kept. Backward may
    run parts of the module again (torch's checkpoint), which must read what its forward read."""

    stage: Stage
    reads: Reads
    inputs: list[Any]
    outputs: list[Any] | None
    again: Callable[[], list[Any]]

    @property
    def version(self) -> int:
        return self.reads.version

    def backward(self, gradients: Sequence[Tensor | None] | None, take: Take) -> Landed:
        """The backward pass; without `gradients` the output is a loss.

        Every weight's gradient is given to `take` as soon as backward has made it, so that those of a whole stage need
        never be there beside their sum.
        """
        with self.reads.here():
            return self._land(gradients, take)

    def within(self) -> AbstractContextManager[None]:
        """The stage has the weights that its forward read."""
        return self.stage.places.holding(self.reads.weights)

    def _land(self, gradients: Sequence[Tensor | None] | None, take: Take) -> Landed:
        outputs = self.outputs if self.outputs is not None else self.again()
        weights = {name: weight for name, weight in self.reads.weights.items() if weight.requires_grad}
        inputs = {place: leaf for place, leaf in enumerate(self.inputs) if _asks(leaf)}
        into = [None] * len(outputs) if gradients is None else [g if g is None else plain(g) for g in gradients]
        pairs = [
            (out, g)
            for out, g in zip(outputs, into, strict=True)
            if _asks(out) and (g is not None or gradients is None)
        ]
        if pairs and (weights or inputs):
            with _handing_over(weights, take), self.within():
                sources = [*weights.values(), *inputs.values()]
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs], inputs=sources)
        value: Gradients = [None] * len(self.inputs)
        for place, leaf in inputs.items():
            value[place] = _taken_off(leaf)
        return Landed(value, [*(value[place] for place in inputs), *into])


@contextmanager
def _handing_over(weights: Weights, take: Take) -> Iterator[None]:
    """Gives each leaf's gradient away when backward has made all of it."""
    names = {id(weight): name for name, weight in weights.items()}

    def hand_over(leaf: Tensor) -> None:
        gradient = _taken_off(leaf)
        if gradient is not None:
            take(names[id(leaf)], gradient)

    hooks = [weight.register_post_accumulate_grad_hook(hand_over) for weight in weights.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _taken_off(leaf: Tensor) -> Tensor | None:
    """Dense, since sums over micro-batches and ranks lie in flat tensors: of an Embedding(sparse=True), too."""
    gradient, leaf.grad = leaf.grad, None
    return gradient.to_dense() if gradient is not None and gradient.layout != torch.strided else gradient


def detached(value: Any) -> Value:
    """What the user hands to the first stage: nothing in it asks for a gradient."""
    leaves, spec = tree_flatten(value)
    return Value([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


class OwnLoss(NamedTuple):
    """What a stage learns from instead of the next one's gradient. of: the output, a scalar; it may read the stage's
    weights."""

    of: Callable[[Any], Tensor]
    is_last: bool


class _Made(NamedTuple):
    """Of one run: the outputs at which backward begins, and what is handed on."""

    outputs: list[Any]
    handed_on: Value


def forward_stage(
    stage: Stage,
    reads: Reads,
    value: Value,
    stream: RandomStream,
    autocast: Autocast,
    loss: OwnLoss | None = None,
    keep: bool = True,
) -> tuple[Value, StageActivation]:
    """The forward pass.

    Args:
        stream: that its forward draws from.
        autocast: that of the user when the micro-batch was handed in.
        loss: of a stage that learns from one. The value returned is the last stage's loss; of another it is the output,
            through which no gradient comes back.
        keep: whether to keep the graph; if not, the stage runs again just before its backward (recomputation).

    Returns:
        the value for the next stage, cut off, and the flight to land later.
    """
    inputs = StageInputs(stage.index, value.leaves)
    device = next((w.device for w in reads.weights.values()), torch.device("cpu"))

    def run(buffers: Mapping[str, Tensor]) -> _Made:
        with torch.enable_grad(), seeded(*stream, device), autocast.again(), reads.here():
            given = inputs.given()
            with stage.places.holding({**reads.weights, **buffers}):
                output = stage.module(tree_unflatten(given, value.spec))
                made = output if loss is None else loss.of(output)
        leaves, spec = tree_flatten(made if loss is None or loss.is_last else output)
        came = {id(leaf) for leaf in given if isinstance(leaf, Tensor)}
        passed_on = frozenset(number for number, leaf in enumerate(leaves) if id(leaf) in came)
        return _Made(tree_leaves(made), Value(leaves, spec, passed_on))

    def again() -> list[Any]:
        inputs.refuse_written()
        return run(stage.buffers.again(found)).outputs

    with nullcontext() if keep else inputs.kept(), nullcontext(Found()) if keep else stage.buffers.forward() as found:
        outputs, out = run({})  # with a graph, which alone says what asks for a gradient
    passed = [
        plain(leaf.detach()).requires_grad_(loss is None and leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in out.leaves
    ]
    kept = StageActivation(stage, reads, inputs.leaves, outputs if keep else None, again)
    return replace(out, leaves=passed), kept


def _asks(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
