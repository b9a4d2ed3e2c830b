"""The sum of what ranks hold of one tensor, coded on the way: for layers that are cut over ranks.

A linear layer cut by its inputs gives every rank a part of the output; the output is their sum. Forward sends the
parts coded, in an exchange without memory; backward passes the gradient on as it is, since every rank has it whole. So
rounding is not differentiated: its derivative is zero almost everywhere.

Source: the operator g of Megatron-LM (Shoeybi et al., 2019), with a code on its way as in "Does compressing activations
help model-parallel training?" (Bian et al., MLSys 2024).
"""

from typing import Any

import torch
from torch import Tensor

from armillary.codecs.packing import all_finite
from armillary.codecs.registry import CODECS, codec_of
from armillary.exchanges.coded import coded
from armillary.exchanges.dense import DenseExchange
from armillary.plans.parcel import Layout, Parcel
from armillary.plans.registry import Choice
from armillary.transport.transport import Transport

__all__ = ["CodedSum", "coded_sum"]

LABEL = "coded sum"


def coded_sum(
    codec: Choice | str, *, wire: str = "", process_group: Any = None, check_order: bool = False
) -> "CodedSum":
    """Opens a sum over ranks, to be called in a model's forward: `total = sums(part)`. Collective; close it at the end.

    Args:
        codec: of a fixed length and without lots, as in "quantize(bits=8)". What it leaves out is lost: NOT exact.
        wire: "gathered" or "scattered", as exchanges of that name have it; empty: what sends less.
        process_group: the ranks whose parts are added up; without, all of the job.
        check_order: whether ranks compare what they ask for first. A rank with a part of another shape is then named.

    Raises:
        ValueError: no such codec, or one that cannot be used here.
    """
    choice = CODECS.named(codec)
    made = codec_of(choice)
    if made.draws:
        raise ValueError(
            f"coded_sum: {choice} draws by lot, so a layer that is computed again would get another sum; take one that "
            "does not"
        )
    return CodedSum(
        coded(made, wire, feedback=False), str(choice), Transport(1, check_order, process_group=process_group)
    )


class CodedSum:
    """A sum over ranks that is open; see `coded_sum`. All of them call it, in the same order.

    sums(part): part: floating, the same shape on every rank; -> the sum, in part's dtype, on every rank the same. Not a
        number where some rank's part is not finite.
    """

    def __init__(self, exchange: DenseExchange, name: str, transport: Transport) -> None:
        self._exchange, self._name, self._transport = exchange, name, transport

    def __call__(self, part: Tensor) -> Tensor:
        """
        Raises:
            ValueError: the codec cannot code such numbers.
            RuntimeError: another rank's part has another size.
        """
        total: Tensor = _Sum.apply(part, self)  # type: ignore[no-untyped-call]
        return total

    def close(self) -> None:
        """Gives the connections back. Collective."""
        self._transport.close()

    def _added(self, part: Tensor) -> Tensor:
        exchange, place = self._exchange, self._transport.place
        layout = _layout(part, exchange.align)
        if complaint := exchange.refuses(layout):
            raise ValueError(f"coded_sum: {self._name} cannot carry this part: {complaint}")
        values = torch.nn.functional.pad(part.flatten(), (0, layout.numel - part.numel()))
        is_sick = not bool(all_finite(values))
        tail = torch.tensor(
            [float(part.numel()), float(is_sick)], dtype=torch.float64
        )  # codes may be as long as others
        parcel = Parcel(values, tail, layout)
        result, _ = self._transport.complete(exchange.push(parcel, exchange.begin(layout, place, values), place), LABEL)
        everyones = int(result.used[0])
        if everyones != place.workers * part.numel():  # codes of unlike parts may be as long
            raise RuntimeError(
                f"coded_sum: rank {place.rank} has a part of {part.numel()} numbers, all {place.workers} ranks "
                f"together have {everyones}; give every rank's part the same shape"
            )
        total: Tensor = result.values[: part.numel()].view(part.shape)
        return torch.full_like(total, float("nan")) if result.nonfinite else total


class _Sum(torch.autograd.Function):
    """Coded sum forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, sums: CodedSum) -> Tensor:
        return sums._added(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _layout(part: Tensor, align: int) -> Layout:
    dtype = str(part.dtype).removeprefix("torch.")
    return Layout(("part",), (tuple(part.shape),), dtype, align, is_guarded=True)
