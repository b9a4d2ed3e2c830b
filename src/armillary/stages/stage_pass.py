"""Forward and backward of one stage for one micro-batch, cut off from its neighbours.

A stage's inputs are leaves, so its graph ends at its edges; gradients cross the edges by hand. Values and gradients
cross in one layout (`schedules/random_streams.py`), whatever made them. What a flight keeps between forward and
backward is
what the schedule counts as one held activation.

The inputs of a stage: leaves of its graph, and what its module is given in their place.

Autograd forbids to write in the place of a leaf. A module may: a stage may begin with `ReLU(inplace=True)`. So modules
get the same memory as a result of the leaf. It shares the leaf's version counter, so torch still names what was written
and is wanted by a backward.

The buffers of a stage that several ranks run by turns: what forwards write goes on to the rank that runs it next.

Buffers that no forward writes (masks) stay where they are; one that was written goes on for good, since a later rank
may only read it. Which are written is seen by their values: torch's batch norm writes running statistics without
raising their version counters (torch 2.13).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from armillary.models.split_loss import Autocast
from armillary.schedules.random_streams import RandomStream, plain, seeded
from armillary.stages.partition import Found, Stage
from armillary.stages.weights import UnshardedWeights, Weights

__all__ = [
    "OwnLoss",
    "Reads",
    "SavedTensors",
    "StageActivation",
    "StageBuffers",
    "StageGradients",
    "StageInputs",
    "Value",
    "detached",
    "forward_stage",
]


class StageInputs:
    """Of one micro-batch.

    Args:
        stage: its number, for errors.
    """

    def __init__(self, stage: int, leaves: Sequence[Any]) -> None:
        self.leaves = list(leaves)
        self._stage, self._versions = stage, dict[int, int]()  # of leaves that are read again

    def given(self) -> list[Any]:
        """For the module, a part for each leaf."""
        return [_Given.apply(leaf) if _asks_gradient(leaf) else leaf for leaf in self.leaves]  # type: ignore[no-untyped-call]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a forward that is to run again. What it writes into goes to its writer; the leaf is a copy then."""
        before, copies = self._counted(), [_copy(leaf) for leaf in self.leaves]
        yield
        for place, version in self._counted().items():
            if version != before[place]:
                self.leaves[place] = copies[place]
        self._versions = self._counted()

    def refuse_written(self) -> None:
        """Before it runs again.

        Raises:
            RuntimeError: somebody wrote into a leaf since the first run.
        """
        for place, version in self._versions.items():
            if self.leaves[place]._version != version:
                raise RuntimeError(
                    f"stage {self._stage} is recomputed, but number {place} of the tensors that it reads, of shape "
                    f"{tuple(self.leaves[place].shape)}, was written in place since its forward; want it unchanged "
                    "until its backward: write into a copy, or take the stage out of recompute"
                )

    def _counted(self) -> dict[int, int]:
        """Version counters by place; tensors of inference mode have none, and cannot be written."""
        tensors = {place: leaf for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}
        return {place: leaf._version for place, leaf in tensors.items() if not leaf.is_inference()}


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # what nobody uses has no gradient
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


def _asks_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


class StageBuffers:
    """Of one stage here: `adopt` what others have written, run a forward, and hand on what is `packed`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written = set[int]()  # by any forward so far, on any rank
        self._before: list[Tensor] = []  # copies, of before the forward
        self._look()

    def _look(self) -> None:
        self._before = [buffer.clone() for buffer in self._module.buffers()]

    def adopt(self, leaves: list[Any]) -> None:
        """As they were packed elsewhere."""
        places, tensors = leaves[: len(leaves) // 2], leaves[len(leaves) // 2 :]
        own = list(self._module.buffers())
        for place, tensor in zip(places, tensors, strict=True):
            own[place].copy_(tensor)
        self._written |= set(places)
        self._look()

    def packed(self) -> list[Any]:
        """Which they are, and copies of them."""
        own = list(self._module.buffers())
        pairs = zip(own, self._before, strict=True)
        self._written |= {place for place, (now, then) in enumerate(pairs) if not torch.equal(now, then)}
        self._before = []
        places = sorted(self._written)
        return [*places, *(own[place].clone() for place in places)]


Gradients = list[Tensor | None]  # one per leaf of a value
Take = Callable[[str, Tensor], None]  # gets a weight's name and its gradient; a weight that was not used has none


@dataclass(frozen=True, eq=False)
class Value:
    """A nest of tensors, taken apart: what crosses from one stage to the next. passed_on: numbers of the leaves that go
    out as they came in."""

    leaves: list[Any]
    spec: TreeSpec
    passed_on: frozenset[int] = frozenset()


class _Spot(NamedTuple):
    """A saved tensor: in which of the storages, and where in it."""

    storage: int
    like: Tensor  # of its dtype, without elements
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """What autograd keeps of one forward, where that may be elsewhere until the backward: storage by storage.

    Args:
        weights: stay where they are.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._stays = {weight.untyped_storage().data_ptr() for weight in weights}
        self._storages: list[UntypedStorage | None] = []
        self._places: dict[int, int] = {}  # by address

    def hooks(self) -> saved_tensors_hooks:
        """Around the forward."""
        return saved_tensors_hooks(self._note, self._look_up)

    def take(self) -> list[Tensor]:
        """All of them, as bytes: from now on nobody here holds any."""
        found = [one for one in self._storages if one is not None]
        self._storages, self._places = [None] * len(found), {}
        return [torch.empty(0, dtype=torch.uint8, device=one.device).set_(one) for one in found]

    def put_back(self, taken: Sequence[Tensor]) -> None:
        """Before the backward."""
        self._storages = [one.untyped_storage() for one in taken]

    def _note(self, saved: Tensor) -> Any:
        if saved.is_leaf or (saved._base is not None and saved._base.is_leaf) or saved.layout != torch.strided:
            return saved
        storage = saved.untyped_storage()
        if storage.data_ptr() in self._stays:
            return saved
        place = self._places.setdefault(storage.data_ptr(), len(self._storages))
        if place == len(self._storages):
            self._storages.append(storage)
        like = torch.empty(0, dtype=saved.dtype, device=saved.device)
        return _Spot(place, like, tuple(saved.shape), saved.stride(), int(saved.storage_offset()))

    def _look_up(self, noted: Any) -> Tensor:
        if not isinstance(noted, _Spot):
            kept: Tensor = noted
            return kept
        storage = self._storages[noted.storage]
        assert storage is not None, "its instruction did not bring it back"
        return torch.empty_like(noted.like).set_(storage, noted.offset, noted.size, noted.stride)


@dataclass(frozen=True, eq=False)
class Reads:
    """What a forward reads of the model: weights of one version, by the stage's own names. borrowed: where the weights
    are here for one action at a time. apart: where what autograd keeps need not stay here."""

    version: int
    weights: Weights
    borrowed: UnshardedWeights | None = None
    apart: SavedTensors | None = None

    def here(self) -> AbstractContextManager[Any]:
        """Around an action that reads the weights."""
        if self.apart is not None:
            return self.apart.hooks()
        return nullcontext() if self.borrowed is None else self.borrowed.here()


@dataclass(frozen=True, eq=False)
class StageGradients:
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

    def backward(self, gradients: Sequence[Tensor | None] | None, take: Take) -> StageGradients:
        """The backward pass; without `gradients` the output is a loss.

        Every weight's gradient is given to `take` as soon as backward has made it, so that those of a whole stage need
        never be there beside their sum.
        """
        with self.reads.here():
            return self._land(gradients, take)

    def within(self) -> AbstractContextManager[None]:
        """The stage has the weights that its forward read."""
        return self.stage.places.holding(self.reads.weights)

    def _land(self, gradients: Sequence[Tensor | None] | None, take: Take) -> StageGradients:
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
        return StageGradients(value, [*(value[place] for place in inputs), *into])


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
    dense = [buffer for buffer in stage.module.buffers() if buffer.layout == torch.strided]
    rewritten = {buffer.untyped_storage().data_ptr() for buffer in dense}
    passed = [
        _apart_from(leaf, rewritten).requires_grad_(loss is None and leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in out.leaves
    ]
    kept = StageActivation(stage, reads, inputs.leaves, outputs if keep else None, again)
    return replace(out, leaves=passed), kept


def _apart_from(leaf: Tensor, rewritten: Collection[int]) -> Tensor:
    """Cut off, and a copy where it lies in a buffer: the next forward may write there before this value has left."""
    value = plain(leaf.detach())
    inside = value.layout == torch.strided and value.untyped_storage().data_ptr() in rewritten
    return value.clone() if inside else value


def _asks(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
