"""What every rank says of itself with each exchange of gradients: its step, what it is doing, its optimizer's options.

Ranks whose loops go different ways pair the wrong exchanges, and nothing else would show it. It is three whole numbers
to every other rank, asked for before the first group leaves and read when all have landed, so nobody waits for it.

A rank whose backward reaches no parameter takes part in its `optimizer.step()` only, and cannot clip, say, as the
others do. So before such a step ranks tell whether they changed their gradients.

Ranks that step by other options come apart. Schedulers on unlike processors may round differently. So options are
compared by a number after rounding, and where that differs by how far they are apart.
"""

import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from armillary.plans.requests import AllToAll, Program
from armillary.tables.optimizers import members

__all__ = [
    "BACKWARD",
    "LATE",
    "STEPS",
    "WROTE",
    "LastOptions",
    "Option",
    "RankState",
    "RankStates",
    "exchange_states",
    "options_now",
    "refuse_written",
    "unlike_options",
]

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
    """Those with which each optimizer stepped last, and what of its parameters was frozen. It keeps no optimizer: a
    model's tables may outlive theirs.

    alike: parameters that all ranks hold alike, with their names.
    """

    alike: Mapping[Tensor, str]
    _read: WeakKeyDictionary[Optimizer, list[Option]] = field(default_factory=WeakKeyDictionary)
    _trains: WeakKeyDictionary[Optimizer, list[dict[str, bool]]] = field(default_factory=WeakKeyDictionary)
    _numbers: WeakKeyDictionary[Optimizer, int] = field(default_factory=WeakKeyDictionary)

    def read(self, optimizer: Optimizer) -> None:
        """It is about to step."""
        self._read[optimizer] = found = options_now(optimizer, self.alike)
        self._trains[optimizer] = trains = [
            {self.alike[one]: one.requires_grad for one in group["params"] if one in self.alike}
            for group in optimizer.param_groups
        ]
        said = [*(_rounded(one.value) for one in found), *([*one.values()] for one in trains)]
        self._numbers[optimizer] = zlib.crc32(repr(said).encode())

    @property
    def number(self) -> int:
        """The same where options are, up to rounding."""
        return zlib.crc32(repr([*self._numbers.values()]).encode())

    @property
    def options(self) -> list[Option]:
        trains = [
            Option(type(optimizer).__name__, number, f"requires_grad of {name}", flag)
            for optimizer, groups in self._trains.items()
            for number, group in enumerate(groups)
            for name, flag in group.items()
        ]
        return [*(one for found in self._read.values() for one in found), *trains]


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


BACKWARD, LATE, STEPS, WROTE = range(4)  # exchanges in its backward; in its step; steps; the same, and it wrote


class RankState(NamedTuple):
    """step: optimizer steps taken. doing: one of those above. options: a number of the last step's."""

    step: int
    doing: int
    options: int

    @property
    def rest(self) -> int:
        """What a header of a look-up does not tell: one whole number, exact in float64."""
        return 4 * self.options + self.doing


@dataclass(frozen=True)
class RankStates:
    """By rank."""

    words: Sequence[RankState]

    @classmethod
    def told(cls, step: int, rests: Sequence[int]) -> "RankStates":
        """On the headers of look-ups, all of one step."""
        return cls([RankState(step, rest % 4, rest // 4) for rest in rests])

    @property
    def late(self) -> list[int]:
        return [rank for rank, word in enumerate(self.words) if word.doing == LATE]

    @property
    def has_one_option(self) -> bool:
        return len({word.options for word in self.words}) == 1


def exchange_states(word: RankState, workers: int) -> Program[RankStates]:
    """Every rank's.

    Raises:
        RuntimeError: ranks are at different steps, or some are in a backward and others in a step. On every rank.
    """
    ones = (1,) * workers
    heard: Tensor = yield AllToAll(torch.tensor([word] * workers), ones, ones)
    words = RankStates([RankState(*one) for one in heard.tolist()])
    _refuse_other_ways(words)
    return words


def _refuse_other_ways(heard: RankStates) -> None:
    """
    Raises:
        RuntimeError: ranks are at different steps, or some are in a backward and others in a step. On every rank.
    """
    steps, doing = [word.step for word in heard.words], [word.doing for word in heard.words]
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"ranks have taken different numbers of optimizer steps {steps} (rank order), so gradients of other steps "
            "met; make as many backwards and steps on every rank. If a GradScaler skips steps, pass it to parallelize "
            "or attach (scaler=scaler)"
        )
    stepping = [rank for rank, one in enumerate(doing) if one in (STEPS, WROTE)]
    if stepping and len(stepping) < len(doing):
        others = [rank for rank in range(len(doing)) if rank not in stepping]
        raise RuntimeError(
            f"step {steps[0] + 1}: ranks {stepping} are in optimizer.step() while ranks {others} run another backward; "
            "make as many backwards a step on every rank, all but the last under run.no_sync()"
        )


def refuse_written(heard: RankStates, late: Sequence[int]) -> None:
    """
    Args:
        late: ranks that took part in the exchange in their step only.

    Raises:
        RuntimeError: a rank wrote into its gradients since. On every rank.
    """
    if wrote := [rank for rank, word in enumerate(heard.words) if word.doing == WROTE]:
        raise RuntimeError(
            f"step {heard.words[0].step + 1}: the backward of {_ranks(late)} reached no parameter, so gradients arrive "
            f"there in optimizer.step() only; {_ranks(wrote)} changed gradients between backward and step (clipping, "
            "scaling?), which would be missing there. Let every rank's loss reach a parameter, by adding 0.0 * "
            "sum(p.sum() for p in model.parameters()) where it reaches none"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
