"""The memory that a plan may count on: what is free beside the model that it is made for, and what that holds itself.

A plan is for the model as a whole, so what its weights, gradients and optimizer state take already is no memory lost.
Buffers are: no forecast counts them.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from armillary.facts.topology import Topology
from armillary.runtime.transport import Transport

__all__ = ["with_room_of"]


def with_room_of(model: nn.Module, optimizer: Optimizer, topology: Topology, transport: Transport) -> Topology:
    """Collective: the topology, with the memory that these hold on the rank where they hold least.

    Args:
        topology: measured beside them.
    """
    device = "cpu" if topology.backend == "gloo" else "cuda"
    there = sum(tensor.nbytes for tensor in _held(model, optimizer) if tensor.device.type == device)
    (least,) = transport.agree_largest([-float(there)])
    return replace(topology, memory_bytes=topology.memory_bytes - int(least))


def _held(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    for parameter in model.parameters():
        gradient = parameter.grad
        yield parameter
        if gradient is not None:
            yield gradient._values() if gradient.is_sparse else gradient
    for state in optimizer.state.values():
        yield from (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
