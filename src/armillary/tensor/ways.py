"""The ways to cut a region, as data: which axes cut what, and over which axes a linear layer gathers and sums.

Sources: `columns_rows` Megatron-LM (Shoeybi et al., 2019, section 3); `2d` Xu et al., 2021; `2.5d` Wang et al., 2022;
`3d` Bian et al., 2021; `heads` DeepSpeed-Ulysses (Jacobs et al., 2023); `ring` Li et al., 2021 (ring self-attention).
Departure of 2d and 2.5d: pieces are gathered in one message where SUMMA makes q broadcasts; the bytes are the same.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["WAYS", "CutWay", "LinearCut", "pieces"]


@dataclass(frozen=True)
class LinearCut:
    """How one role of linear layer is cut.

    Args of note:
        inputs, outputs: axes that cut the features of the weight, outermost first.
        gather_x: the axis over which its input is gathered, and what of it was cut: "features" or "rows".
        gather_weight: the axis over which the weight is gathered, along its inputs.
        scatter: the axis over which partial outputs are summed, each rank keeping a piece of the rows.
        sum_weight, sum_bias: axes over which ranks hold alike what they computed from different rows.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gather_x: str = ""
    gathered: Literal["features", "rows"] = "features"
    gather_weight: str = ""
    scatter: str = ""
    sum_weight: tuple[str, ...] = ()
    sum_bias: tuple[str, ...] = ()


@dataclass(frozen=True)
class CutWay:
    """One way.

    Args of note:
        axes: beside "data".
        rows, tokens, features: axes that cut the activation between blocks, outermost first.
        inner_rows: axes that cut rows between a column and a row linear. heads: axes that cut heads there.
        linears: by role; none where linear layers stay whole.
        sum_norms: axes over which gradients of norms are summed.
        exchanges: what attention does where tokens are cut.
    """

    axes: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    inner_rows: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    linears: Mapping[str, LinearCut] = field(default_factory=dict)
    sum_norms: tuple[str, ...] = ()
    exchanges: Literal["", "by heads", "in a ring"] = ""

    @property
    def cuts_heads(self) -> tuple[str, ...]:
        """Axes whose ranks must divide the heads."""
        return self.tokens if self.exchanges == "by heads" else self.heads

    @property
    def cuts_activations(self) -> bool:
        return bool(self.rows or self.tokens or self.features)


def pieces(sizes: Mapping[str, int], names: Iterable[str]) -> int:
    """How many these axes cut something into."""
    return math.prod(sizes[name] for name in names)


def _grid(depth: tuple[str, ...]) -> CutWay:
    linear = LinearCut(
        ("row",), ("column",), gather_x="column", gather_weight="row", sum_weight=depth, sum_bias=(*depth, "row")
    )
    rows = (*depth, "row")
    return CutWay(
        (*depth, "row", "column"), rows, (), ("column",), rows, ("column",), {"column": linear, "row": linear}, rows
    )


def _cube(out: str, back: str) -> LinearCut:
    return LinearCut(
        (back, "i"), (out,), gather_x=out, gathered="rows", gather_weight="i", scatter=back, sum_bias=("i", back)
    )


WAYS: Mapping[str, CutWay] = {
    "data": CutWay(),
    "columns_rows": CutWay(
        ("tensor",),
        heads=("tensor",),
        linears={"column": LinearCut((), ("tensor",)), "row": LinearCut(("tensor",), ())},
    ),
    "2d": _grid(()),
    "2.5d": _grid(("depth",)),
    "3d": CutWay(
        ("i", "j", "l"),
        rows=("i", "j"),
        features=("l",),
        inner_rows=("i", "l"),
        heads=("j",),
        linears={"column": _cube("j", "l"), "row": _cube("l", "j")},
        sum_norms=("i", "j"),
    ),
    "heads": CutWay(("sequence",), tokens=("sequence",), exchanges="by heads"),
    "ring": CutWay(("sequence",), tokens=("sequence",), exchanges="in a ring"),
}
