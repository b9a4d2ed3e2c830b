"""Options of an optimizer's groups (learning rate, weight decay), as ranks compare them: by a number, then in words.

Ranks that step by other options come apart, and nothing else would say so. Schedulers on unlike processors may round
otherwise, so the number is of what is left after rounding, and the words judge by how far options are apart.
"""

import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from armillary.runtime.hybrid.optimizers import members

__all__ = ["LastOptions", "Option", "options_now", "unlike_options"]

NOT_OPTIONS = ("params", "param_names")
ROUNDING = 1e-5  # relative


class Option(NamedTuple):
    """value: a number, text, None, or a sequence of such."""

    kind: str
    group: int
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name} in group {self.group} of {self.kind}"


def options_now(optimizer: Optimizer, alike: Container[Tensor], reads_tensors: bool = False) -> list[Option]:
    """Of the groups that hold one of these parameters at least.

    Args:
        alike: parameters that all ranks hold alike. reads_tensors: numbers in tensors count, which may wait for a
            device; else they are left out.
    """
    return [
        Option(type(one).__name__, number, name, float(value) if isinstance(value, Tensor) else value)
        for one in members(optimizer)
        for number, group in enumerate(one.param_groups)
        if any(parameter in alike for parameter in group["params"])
        for name, value in group.items()
        if name not in NOT_OPTIONS and (_is_read(value) or (reads_tensors and _is_number(value)))
    ]


def _is_read(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_read, value))
    return value is None or isinstance(value, float | int | str | Real)  # functions, say, are not


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


@dataclass(eq=False)
class LastOptions:
    """Those with which each optimizer stepped last. It keeps no optimizer: a model's tables may outlive theirs.

    alike: parameters that all ranks hold alike.
    """

    alike: Container[Tensor]
    _read: WeakKeyDictionary[Optimizer, list[Option]] = field(default_factory=WeakKeyDictionary)
    _numbers: WeakKeyDictionary[Optimizer, int] = field(default_factory=WeakKeyDictionary)

    def read(self, optimizer: Optimizer) -> None:
        """It is about to step."""
        self._read[optimizer] = found = options_now(optimizer, self.alike)
        self._numbers[optimizer] = zlib.crc32(repr([_rounded(one.value) for one in found]).encode())

    @property
    def number(self) -> int:
        """The same where options are, up to rounding."""
        return zlib.crc32(repr([*self._numbers.values()]).encode())

    @property
    def options(self) -> list[Option]:
        return [one for found in self._read.values() for one in found]


def _rounded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [*map(_rounded, value)]
    return f"{value:.6g}" if isinstance(value, Real) else value


def unlike_options(by_rank: Mapping[int, Sequence[Option]]) -> str:
    """The first that ranks give otherwise, with what each gives; empty where all are alike but for rounding."""
    first = next(iter(by_rank.values()), ())
    if any([str(one) for one in theirs] != [str(one) for one in first] for theirs in by_rank.values()):
        return f"numbers of options ({', '.join(f'rank {rank}: {len(theirs)}' for rank, theirs in by_rank.items())})"
    for place, one in enumerate(first):
        values = {rank: theirs[place].value for rank, theirs in by_rank.items()}
        if not all(_is_near(value, one.value) for value in values.values()):
            return f"{one} ({', '.join(f'rank {rank}: {_text(value)}' for rank, value in values.items())})"
    return ""


def _is_near(value: Any, other: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_is_near, value, other))
    if isinstance(value, Real) and isinstance(other, Real):
        one, two = float(value), float(other)
        return one == two or one != one != two or abs(one - two) <= ROUNDING * max(abs(one), abs(two))
    return bool(value == other)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
