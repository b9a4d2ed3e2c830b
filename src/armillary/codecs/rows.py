"""Rows coded one by one, for exchanges that move the rows of a table: the code of a row hangs on that row alone.

So a row arrives alike wherever it is read, whatever it travels with, and codes are counted as rows are. A byte ahead of
each code says whether a number was not finite; then all of the row arrives as not a number. Nothing is remembered: what
a code leaves out is lost. A residual for every row on every rank that reads it would be as large as the whole table.

Source: quantized communication of TorchRec, with a scale of each row's own.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.codecs.registry import CODECS, GUARD_BYTES, Codec, codec_of
from armillary.plans.registry import Choice

__all__ = ["AS_THEY_ARE", "RowCode", "RowCodes", "row_code"]


def _row_by_row(write: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """All at once, where torch can: its vmap reads numbers as bytes since 2.13. Before that, one after another."""
    if torch.__version__ < "2.13":
        return torch.stack([write(row) for row in rows])
    return torch.vmap(write, randomness="same")(rows)


class RowCode(NamedTuple):
    """Shapes: rows (k, *row), their codes (k, code_bytes) uint8. codec: None: rows travel as they are."""

    codec: Codec | None = None

    def encode(self, rows: Tensor) -> Tensor:
        if self.codec is None:
            return rows
        nbytes = self.code_bytes(rows.shape[1:].numel() * rows.itemsize, rows.itemsize)
        if not len(rows):
            return torch.empty(0, nbytes, dtype=torch.uint8, device=rows.device)
        flat = rows.reshape(len(rows), -1)
        is_sick = ~flat.isfinite().all(1, keepdim=True)
        finite = torch.where(is_sick, torch.zeros_like(flat), flat)
        encode = self.codec.encode
        codes = _row_by_row(lambda row: encode(row, None), finite)
        return torch.cat([is_sick.to(torch.uint8), codes], 1)

    def decode(self, code: Tensor, like: Tensor) -> Tensor:
        """like: (any, *row), whose dtype and device rows are to have."""
        if self.codec is None:
            return code
        if not len(code):
            return like.new_empty((0, *like.shape[1:]))
        decode, count = self.codec.decode, like.shape[1:].numel()
        empty = torch.empty(0, dtype=like.dtype, device=like.device)
        flat = _row_by_row(lambda one: decode(one, count, empty), code[:, GUARD_BYTES:])
        flat = torch.where(code[:, :GUARD_BYTES].bool(), torch.full_like(flat, torch.nan), flat)
        return flat.view(len(code), *like.shape[1:])

    def code_bytes(self, row_bytes: int, item_bytes: int) -> int:
        """Of a row of so many bytes, in numbers of so many."""
        if self.codec is None:
            return row_bytes
        return GUARD_BYTES + self.codec.coded_bytes(row_bytes // item_bytes, item_bytes)

    @property
    def work(self) -> float:
        """Numbers read and written per number, by encoding and decoding together."""
        return 0.0 if self.codec is None else self.codec.work

    def meaning(self, rows: Tensor) -> Tensor:
        """What decoding gives, written without bytes, row after row."""
        if self.codec is None or not len(rows):
            return rows
        flat = rows.reshape(len(rows), -1)
        found = [
            self.codec.meaning(row, None) if bool(row.isfinite().all()) else torch.full_like(row, torch.nan)
            for row in flat
        ]
        return torch.stack(found).view(rows.shape)


AS_THEY_ARE = RowCode()


class RowCodes(NamedTuple):
    """How the rows of a table travel to who reads them, and their gradients back."""

    rows: RowCode = AS_THEY_ARE
    gradients: RowCode = AS_THEY_ARE

    @property
    def departs(self) -> tuple[str, ...]:
        """In what it is not exact; see `plans/group.py`."""
        return () if self == RowCodes() else ("lossy",)

    @property
    def work(self) -> float:
        """Numbers read and written per number of a row, on its way there and back."""
        return self.rows.work + self.gradients.work

    def refuses(self, row_bytes: int, item_bytes: int) -> str:
        """Why rows of so many bytes, in numbers of so many, had better not be coded so; empty if they may."""
        for what, code in (("rows", self.rows), ("gradients", self.gradients)):
            coded = code.code_bytes(row_bytes, item_bytes)
            if code.codec is not None and coded >= row_bytes:
                return f"a row has {row_bytes} bytes, and {coded} in the code of its {what}"
        return ""


def row_code(option: str, choice: Choice | str | None) -> RowCode:
    """
    Args:
        option: by which it was named, for errors.

    Raises:
        ValueError: no such codec, or none that a row can be written by alone.
    """
    if choice is None:
        return AS_THEY_ARE
    if not isinstance(choice, str | Choice):
        raise ValueError(f"{option}={choice!r}: want a codec, as in {option}=quantize(bits=8)")
    try:
        codec = codec_of(choice)
    except ValueError as error:
        raise ValueError(f"{option}={choice}: {error}; rows keep no state, so only codecs can write them") from error
    reason = "how long its code is the data decide" * (not codec.is_fixed) or "it draws by lot" * codec.draws
    if reason:
        raise ValueError(
            f"{option}={choice}: {reason}, and a row must arrive alike wherever it is read, in a place that is known "
            f"beforehand; want one of {', '.join(_able())}"
        )
    return RowCode(codec)


def _able() -> list[str]:
    made = {name: entry.make(**entry.examples[0]) for name, entry in CODECS.all().items()}
    return [name for name, one in made.items() if one.is_fixed and not one.draws]
