"""Inference on the shards of a cut: before each layer an uneven all-to-all of what somebody needs, then one product."""

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from armillary.repurpose.groups import ServingGroup
from armillary.repurpose.layer_chain import Layer, made
from armillary.repurpose.shards import index_of, tensors_of

__all__ = ["Serving", "serve"]

REFUSED = -1  # told in place of a batch size


def serve(folder: str | Path, timeout_seconds: float = 60.0) -> "Serving":
    """Opens the shards of this rank; every rank of the job calls it.

        with repurpose.serve("shards") as run:
            y = run(x)  # rank 0's x; the result on rank 0, None elsewhere

    Args:
        folder: what `shards.save` wrote, as this rank sees it.
        timeout_seconds: how long one exchange may take before ranks that are silent are named.

    Raises:
        ValueError: on every rank, if the folder of one holds no shards, or those for another number of ranks.
    """
    group = ServingGroup(timeout_seconds)
    error, index, part = "", {}, {}
    try:
        index = index_of(folder)
        if index["workers"] != group.workers:
            raise ValueError(
                f"repurpose.serve: {folder} is saved for {index['workers']} ranks, the job has {group.workers}; start "
                "as many, or cut for as many"
            )
        part = tensors_of(folder, group.rank, group.workers)
    except ValueError as found:
        error = str(found)
    told = group.agree(error)
    if told:
        group.close()
        raise ValueError(told)
    return Serving(group, index, part)


class Serving:
    """A cut model in service. Calls are collective: as many on every rank."""

    def __init__(self, group: ServingGroup, index: dict[str, Any], part: dict[str, Tensor]) -> None:
        self._group, self._exchanges, self._part = group, index["exchanges"], part
        self._sample, self._dtype = tuple(index["sample"]), getattr(torch, index["dtype"])
        self._head = nn.Sequential(*map(made, index["head"]))
        self._layers = [self._local(number, one) for number, one in enumerate(index["layers"], 1)]
        last = len(self._layers) + 1
        self._order = torch.cat([part[f"{last}.held"], part[f"{last}.arriving"]]).argsort()

    @torch.no_grad()
    def __call__(self, x: Tensor | None = None) -> Tensor | None:
        """
        Args:
            x: on rank 0 a batch of any size, as the model takes it; not read elsewhere.

        Returns:
            On rank 0 what the model gives; elsewhere None.

        Raises:
            ValueError: on every rank, if rank 0 gave another shape or type than the model was cut with.
            RuntimeError: a rank is gone or silent; the message names it.
        """
        wrong = self._refusal(x) if self._group.rank == 0 else ""
        batch = self._group.from_rank_0(REFUSED if wrong or x is None else len(x))
        if batch == REFUSED:
            raise ValueError(wrong or "repurpose: rank 0 gave something else than the model takes; see its error")
        held = self._head(x) if self._group.rank == 0 else torch.empty(batch, 0, *self._shape(0), dtype=self._dtype)
        scattered = self._exchanged(0, held)
        y = held[:, self._part["1.held"]] if self._group.rank == 0 else scattered
        for number, local in enumerate(self._layers, 1):
            y = torch.cat([y, self._exchanged(number, y)], 1)
            if not y.shape[1]:  # torch convolves no input without channels
                y = y.new_zeros(batch, 1, *self._shape(number))
            y = local(y) if local else y.new_empty(batch, 0, *self._shape(number + 1))
        last = len(self._layers) + 1
        y = torch.cat([y, self._exchanged(last, y)], 1)
        return y[:, self._order] if self._group.rank == 0 else None

    def close(self) -> None:
        self._group.close()

    def __enter__(self) -> "Serving":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refusal(self, x: Tensor | None) -> str:
        want = f"repurpose: rank 0: want a {self._dtype} tensor (batch, {', '.join(map(str, self._sample))})"
        if not isinstance(x, Tensor):
            return f"{want}, got {type(x).__name__}"
        if tuple(x.shape[1:]) != self._sample or x.dtype != self._dtype or not x.dim():
            return f"{want}, got {x.dtype} {tuple(x.shape)}"
        return ""

    def _shape(self, number: int) -> tuple[int, ...]:
        return tuple(self._exchanges[number]["shape"])

    def _exchanged(self, number: int, held: Tensor) -> Tensor:
        """(batch, arriving, ...); nothing is asked of anybody where nobody needs anything."""
        counts = self._exchanges[number]["counts"]
        if not any(map(any, counts)):
            return held.new_empty(len(held), 0, *held.shape[2:])
        leaving = held.transpose(0, 1)[self._part[f"{number}.leaving"]].contiguous()
        return self._group.all_to_all(leaving, counts).transpose(0, 1)

    def _local(self, number: int, described: dict[str, Any]) -> nn.Module | None:
        """This rank's neurons of a layer; None where it has none."""
        weight, bias = self._part[f"{number}.weight"], self._part[f"{number}.bias"]
        if not len(weight):
            return None
        if not weight.shape[1]:
            weight = weight.new_zeros(len(weight), 1, *weight.shape[2:])
        layer = Layer(described["name"], weight, bias, described["convolution"])
        return nn.Sequential(layer.module(weight, bias), *map(made, described["after"]))
