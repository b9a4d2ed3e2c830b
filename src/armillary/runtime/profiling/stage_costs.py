"""What a forward pass of each stage costs: floating point operations, and activations kept for the backward
pass.

Schedules weigh stages by their operations, and their memory is the activations that wait for a backward pass.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from armillary.facts.stage import Numbers
from armillary.facts.stage_paths import OUTSIDE
from armillary.schedules.edge import is_codable

__all__ = ["Activations", "CountOperations"]

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
