"""What a stage of a model takes in one step: seconds, operations, and activations kept for backward.

Seconds are taken apart from operations, because counting slows a pass down. Schedules weigh stages by their operations,
and their memory is the activations that wait for a backward.

A table read by row is timed behind a handle whose look-ups end at the rows they bring, as when owners hold them. The
gradient of a whole table costs a pass over all of it: of two tables of 400 MB ten times the rest of the step. Only
plans that keep such a table whole pay that (`planning/pricing.py`).
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from armillary.models.structure import OUTSIDE
from armillary.plans.profile import Numbers
from armillary.schedules.edges import is_codable
from armillary.tables.handle import TableHandle

__all__ = ["Activations", "CountOperations", "StageClock", "gathering", "handle_of_whole"]

aten = torch.ops.aten


class CountOperations(TorchDispatchMode):
    """Counts floating point operations and bytes returned by stage; `enter` and `leave` are for `following`.

    Matrix products, convolutions and attention by torch's own formulas, fused recurrent layers by one of
    ours. Element-wise work is not counted, as in torch.utils.flop_counter.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = [OUTSIDE]
        self.flops: Counter[str] = Counter()
        self.output_bytes: Counter[str] = Counter()
        self.output_numbers: dict[str, tuple[Numbers, ...]] = {}

    def enter(self, stage: str, inputs: Any) -> None:
        self.path.append(stage)

    def leave(self, stage: str, outputs: Any) -> None:
        self.path.pop()
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        self.output_bytes[stage] = sum(tensor.nbytes for tensor in tensors)  # the outermost module leaves last
        self.output_numbers[stage] = tuple(
            Numbers(tensor.numel(), tensor.itemsize)
            for tensor in tensors
            if is_codable(tensor) and tensor.requires_grad
        )

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops[self.path[-1]] += int(flop_registry[packet](*args, **kwargs, out_val=out))
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu:
            self.flops[self.path[-1]] += _attention_flops(*args[:3])
        elif packet in (aten.mkldnn_rnn_layer, aten._cudnn_rnn):
            self.flops[self.path[-1]] += _recurrent_flops(
                args[0], args[1:3] if packet is aten.mkldnn_rnn_layer else args[1]
            )
        return out


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Two matrix products, over shapes (..., positions, width)."""
    scores = query.shape[:-1].numel() * key.shape[-2]
    return 2 * scores * (query.shape[-1] + value.shape[-1])


def _recurrent_flops(states: Tensor, weights: Sequence[Tensor]) -> int:
    """Every matrix among the weights multiplies every position once; `states` is (..., positions, width)."""
    positions = states.shape[:-1].numel()
    return 2 * positions * sum(weight.numel() for weight in weights if weight.dim() == 2)


class Activations:
    """Bytes of the storages that autograd keeps for the backward pass, each charged to the stage that kept it
    first.

    `pack` is for `torch.autograd.graph.saved_tensors_hooks`. The storages are held until this object goes, so
    that a storage made later cannot be taken for one that was freed.
    """

    def __init__(self, model: nn.Module, where: Callable[[], str]) -> None:
        owned = [*model.parameters(), *model.buffers()]
        self.seen = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in owned}
        self.where = where
        self.bytes: Counter[str] = Counter()

    def let_go(self) -> None:
        """Stops holding the storages; to be called when the forward pass is over."""
        self.seen.clear()

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.seen:
                self.seen[storage._cdata] = storage
                self.bytes[self.where()] += storage.nbytes()
        return tensor


def handle_of_whole(name: str, whole: Tensor) -> TableHandle:
    """The rows of a look-up, each id's its own, learn; the table does not."""
    return TableHandle(_WholeTable(name, whole, whole.shape), whole, whole.requires_grad)


@dataclass(eq=False)
class _WholeTable:
    """Equal ids are not merged: that is index work, which is priced apart."""

    name: str
    whole: Tensor
    shape: torch.Size
    gradient: Tensor | None = None
    epoch: int = 0
    accumulates: bool = False

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.whole.detach().index_select(0, ids.reshape(-1).long())
        learns = torch.is_grad_enabled() and self.whole.requires_grad
        return rows.requires_grad_(learns), torch.arange(ids.numel(), device=ids.device).view(ids.shape)

    @property
    def rows(self) -> Tensor:
        return self.whole.detach()

    def everyones(self, part: Tensor) -> Tensor:
        return part.unsqueeze(0)

    def load(self, whole: Tensor) -> None:
        raise AssertionError(f"{self.name}: written to while it is only watched")

    def gradient_norms(self, order: float) -> Tensor:
        raise AssertionError(f"{self.name} has no gradient")

    def drop_gradient(self) -> None:
        """It has none."""

    def drop_accumulated(self) -> None:
        """It has none."""

    def join(self) -> None:
        """Nothing waits."""


@contextmanager
def gathering(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Inside, these parameters, read by row alone, learn nothing: the rows of each look-up do, each id's its own."""
    tables = {parameter: name for name, parameter in model.named_parameters() if name in names}
    swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
    handles = {table: handle_of_whole(name, table) for table, name in tables.items()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in handles:
                swapped.append((module, name, parameter))
    try:
        for module, name, parameter in swapped:
            module._parameters[name] = handles[parameter]  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter


class StageClock:
    """Forward and backward seconds by stage, of one step; `enter` and `leave` are for `following`.

    In the backward pass a stage begins when the gradient of its output is there and ends when the gradient of
    its input is, or another stage begins. Where branches interleave, time between two such events goes to the
    stage whose event came first. On an accelerator every change of stage waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.path = [OUTSIDE]
        self.current = OUTSIDE
        self.forward: defaultdict[str, float] = defaultdict(float)
        self.backward: defaultdict[str, float] = defaultdict(float)
        self.handles: list[Any] = []
        self.charged = self.forward
        self.since = self._now()

    def enter(self, stage: str, inputs: Any) -> None:
        if stage != self.path[-1]:
            self._hook(inputs, lambda: self._turn_to(OUTSIDE) if self.current == stage else None)
        self.path.append(stage)
        self._turn_to(stage)

    def leave(self, stage: str, outputs: Any) -> None:
        self.path.pop()
        if stage != self.path[-1]:
            self._hook(outputs, lambda: self._turn_to(stage))
        if self.charged is self.forward:  # in a backward pass a checkpointed stage ran again: its backward follows
            self._turn_to(self.path[-1])

    def begin_backward(self) -> None:
        self._turn_to(OUTSIDE, always=True)
        self.charged = self.backward

    def end(self) -> None:
        self._turn_to(OUTSIDE, always=True)
        for handle in self.handles:
            handle.remove()

    def _hook(self, tensors: Any, event: Callable[[], None]) -> None:
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.handles.append(leaf.register_hook(lambda _: event()))

    def _turn_to(self, stage: str, always: bool = False) -> None:
        if stage != self.current or always:
            now = self._now()
            self.charged[self.current] += now - self.since
            self.current, self.since = stage, now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
