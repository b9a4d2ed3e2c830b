"""A chain cut over workers: who owns which neuron, which inputs cross to whom, and what each rank multiplies."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from armillary.repurpose.layer_chain import Layer, LayerChain

__all__ = ["CutChain", "CutLayer", "LayerTraffic", "NeuronExchange", "NeuronPlacement"]


@dataclass(frozen=True)
class NeuronPlacement:
    """
    Args of note:
        shares: of every layer's neurons, by worker; they add up to 1.
        is_spread: whether the inputs of the first layer are spread over the workers, too; else they stay on rank 0.
    """

    shares: tuple[float, ...]
    is_spread: bool

    def slots(self, neurons: int) -> list[int]:
        """Neurons a worker; all on rank 0 where there are fewer than workers."""
        if neurons < len(self.shares):
            return [neurons] + [0] * (len(self.shares) - 1)
        ends = [round(neurons * sum(self.shares[: worker + 1])) for worker in range(len(self.shares) - 1)] + [neurons]
        return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]

    def in_order(self, neurons: int) -> Tensor:
        """(neurons,): the owner of each, the first ones on rank 0 and so on."""
        return torch.repeat_interleave(torch.arange(len(self.shares)), torch.tensor(self.slots(neurons)))

    def inputs(self, many: int) -> Tensor:
        return self.in_order(many) if self.is_spread else torch.zeros(many, dtype=torch.long)


@dataclass(frozen=True)
class NeuronExchange:
    """One uneven all-to-all.

    Args of note:
        holders: (neurons,), the rank that has each.
        arrives: (workers, neurons), whether it is sent to that rank; never to its holder.
        shape: of one neuron's values: () or (height, width).
    """

    holders: Tensor
    arrives: Tensor
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        """Sent by all ranks together, a sample."""
        return int(self.arrives.sum()) * torch.Size(self.shape).numel()

    @property
    def counts(self) -> list[list[int]]:
        """[sender][receiver]: neurons."""
        workers = range(len(self.arrives))
        return [[int((self.arrives[to] & (self.holders == rank)).sum()) for to in workers] for rank in workers]

    def leaving(self, rank: int) -> Tensor:
        """Positions among the neurons that this rank holds, receiver by receiver."""
        return self.arrives[:, self.holders == rank].nonzero()[:, 1]

    def held(self, rank: int) -> Tensor:
        return (self.holders == rank).nonzero()[:, 0]

    def arriving(self, rank: int) -> Tensor:
        """Neurons, sender by sender."""
        found = self.arrives[rank].nonzero()[:, 0]
        return found[self.holders[found].argsort(stable=True)]


@dataclass(frozen=True)
class CutLayer:
    """A layer with weights of zero where it is cut, neurons and inputs in the model's order.

    Args of note:
        owners: (neurons,), the worker of each.
        input_owners: (inputs,), the worker where each input is made, or comes to from rank 0.
        shape: of one input's values: () or (height, width).
    """

    layer: Layer
    owners: Tensor
    input_owners: Tensor
    shape: tuple[int, ...]

    @property
    def kept(self) -> Tensor:
        """(neurons, inputs): whether there is a weight."""
        weight = self.layer.weight
        return weight.view(*weight.shape[:2], -1).ne(0).any(-1)

    def exchange(self, workers: int) -> NeuronExchange:
        needs = torch.stack([self.kept[self.owners == worker].any(0) for worker in range(workers)])
        is_far = self.input_owners != torch.arange(workers)[:, None]
        return NeuronExchange(self.input_owners, needs & is_far, self.shape)


@dataclass(frozen=True)
class LayerTraffic:
    """A line of the table of a cut. Values are those of all ranks together, a sample.

    Args of note:
        plain: values that a cut sends which gives every worker all inputs.
        kept: share of the weights.
    """

    name: str
    neurons: tuple[int, ...]
    sent: int
    plain: int
    kept: float


@dataclass(frozen=True)
class CutChain:
    """
    Args of note:
        output_shape: of one output neuron's values.
        notes: what the user should know, a sentence each.
    """

    chain: LayerChain
    placement: NeuronPlacement
    layers: tuple[CutLayer, ...]
    output_owners: Tensor
    output_shape: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def workers(self) -> int:
        return len(self.placement.shares)

    def model(self) -> nn.Sequential:
        return self.chain.model((one.layer.weight, one.layer.bias) for one in self.layers)

    @property
    def exchanges(self) -> tuple[NeuronExchange, ...]:
        """Of inputs from rank 0, before each layer, of outputs to rank 0."""
        first, ranks = self.layers[0], torch.arange(self.workers)[:, None]
        away = (first.input_owners == ranks) & (ranks != 0)
        home = (self.output_owners != 0) & (ranks == 0)
        return (
            NeuronExchange(torch.zeros_like(first.input_owners), away, first.shape),
            *(layer.exchange(self.workers) for layer in self.layers),
            NeuronExchange(self.output_owners, home, self.output_shape),
        )

    def traffic(self) -> Iterator[LayerTraffic]:
        scatter, *between, gather = self.exchanges
        whole = self.placement.inputs(len(scatter.holders))
        yield LayerTraffic("inputs", self._many(whole), scatter.values, _values(whole != 0, scatter.shape), 1.0)
        for cut, exchange in zip(self.layers, between, strict=True):
            neurons = self._many(cut.owners)
            held = self._many(whole if cut is self.layers[0] else cut.input_owners)
            plain = sum(len(exchange.holders) - held[worker] for worker in range(self.workers) if neurons[worker])
            plain *= torch.Size(exchange.shape).numel()
            yield LayerTraffic(cut.layer.name, neurons, exchange.values, plain, float(cut.kept.double().mean()))
        yield LayerTraffic("outputs", self._many(self.output_owners), gather.values, gather.values, 1.0)

    def _many(self, owners: Tensor) -> tuple[int, ...]:
        return tuple(torch.bincount(owners, minlength=self.workers).tolist())


def _values(which: Tensor, shape: tuple[int, ...]) -> int:
    return int(which.sum()) * torch.Size(shape).numel()
