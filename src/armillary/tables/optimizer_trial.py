"""Finds out what an optimizer does to the rows of a matrix by trying it on small tensors, never by its type.

A rank that owns rows steps them with an optimizer of its own, which sees neither the other rows nor their gradients.
That is exact only if stepping a matrix whole and stepping its pieces apart give the same. Whatever a trial raises is an
answer: such an optimizer is not known to step by row.

An optimizer may mix rows for some values only: where a gradient is nearly orthogonal to its matrix (AdamP), where a
norm exceeds a threshold, where a matrix is large (factored or quantised state), or from some step on. So each matrix is
there for one of these, and gradients grow by a factor of ten from step to step.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.sparse import check_sparse_tensor_invariants

from armillary.tables.optimizers import (
    AsksOthers,
    Options,
    kept_elsewhere,
    step_alone,
    tried_alone,
    twin_to_try,
    wants_closure,
)

__all__ = [
    "RowTrial",
    "SmallStep",
    "TrialWay",
    "by_parameter",
    "by_row",
    "leaves_untouched_rows",
    "stepped_ones",
    "steps_by_row",
    "takes_listed_rows",
    "wants_listed_rows",
    "why_not_by_parameter",
    "why_not_by_row",
    "why_whole",
]

Gradients = list[Tensor | None]

ROWS, CUT = 6, 2  # of a small matrix; the rows of its first piece
LARGE_ROWS, LARGE_CUT = 160, 63  # enough to be factored or quantised; the pieces are no multiples of any block
STEPS, LARGE_STEPS, LATER_STEPS = 12, 3, 18  # of all matrices, of the large one, and more of one alone
FIRST_SCALE = 1e-6  # of gradients in the first step; each later one of STEPS has ten times as much
COSINE = 0.01  # of vectors that are nearly orthogonal
TOLERANCE = {torch.float64: 1e-12, torch.complex128: 1e-12}  # relative; of other dtypes:
ROUNDING = 1e-4

STAYS = "does not move a matrix whose gradient is not zero"


@dataclass(frozen=True)
class TrialWay:
    """How an optimizer can be tried: on tensors of which kind, whether gradients list their rows, and whether its
    state is made by its constructor."""

    dtype: torch.dtype
    device: torch.device
    is_listed: bool
    is_built: bool

    def gradient(self, values: Tensor, rows: Tensor | None = None) -> Tensor:
        """As the optimizer is given it. rows: those to list; None: all."""
        if not self.is_listed:
            return values.clone()
        rows = torch.arange(len(values), device=values.device) if rows is None else rows
        return torch.sparse_coo_tensor(rows[None], values[rows], values.shape, is_coalesced=True)


class SmallStep(NamedTuple):
    """A parameter, the optimizer that steps it, and a gradient that it takes."""

    parameter: nn.Parameter
    optimizer: Optimizer
    gradient: Tensor


def by_row(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    pieces = [one.split([CUT, len(one) - CUT] if len(one) == ROWS else [LARGE_CUT, len(one) - LARGE_CUT])
              for one in tensors]  # fmt: skip
    return [[first for first, _ in pieces], [last for _, last in pieces]]


def by_parameter(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [list(tensors[:1]), list(tensors[1:])]


class RowTrial:
    """An optimizer, tried in one way on matrices of so many dimensions."""

    def __init__(self, optimizer: Optimizer, group: Options, way: TrialWay, dims: int) -> None:
        self.optimizer, self.group, self.way = optimizer, group, way
        self.row_shape = {1: (), 2: (4,)}.get(dims, (2,) * (dims - 1))
        self.large_shape = {1: (), 2: (136,)}.get(dims, (17, 8, *(1,) * (dims - 3))[: dims - 1])
        self.draw = torch.Generator().manual_seed(1)

    def begin(self) -> None:
        """One step of a small matrix."""
        (parameter,), like = self._stepper([self._normal(ROWS)])
        parameter.grad = self.way.gradient(self._normal(ROWS))
        step_alone(like)

    def apart(self, split: Callable[[Sequence[Tensor]], list[list[Tensor]]], differs: str) -> str:
        """Why stepping all together is not stepping the parts apart."""
        weights = self._weights()
        whole, like = self._stepper(weights)
        parts = [self._stepper(part) for part in split(weights)]
        for step in range(STEPS + LATER_STEPS):
            values = self._gradients(whole, step)
            self._give(whole, values)
            given = [one if one is not None else torch.empty_like(whole[n]) for n, one in enumerate(values)]
            held = split([torch.full((len(one),), n) for n, one in enumerate(given)])
            for (piece, _), part, numbers in zip(parts, split(given), held, strict=True):
                none = [values[int(number[0])] is None for number in numbers]
                self._give(piece, [None if gone else one for gone, one in zip(none, part, strict=True)])
            for one in (like, *(stepper for _, stepper in parts)):
                step_alone(one)
            if step == 0 and all(map(torch.equal, whole, weights)):
                return STAYS
            moved = [n for n, one in enumerate(values) if one is not None]
            apart = split([one.detach() for one in whole])
            for (piece, _), mine, numbers in zip(parts, apart, held, strict=True):
                pairs = zip(piece, mine, (int(number[0]) for number in numbers), strict=True)
                if not all(self._alike(one.detach(), there) for one, there, n in pairs if n in moved):
                    return differs
        return ""

    def moves_quiet_rows(self) -> str:
        """Rows without gradient, before the others have had one, after it, and long after it."""
        parameters, like = self._stepper(self._weights()[:-1])
        quiet = torch.arange(ROWS // 2)
        for step in range(STEPS):
            before = [self._seen(like, one) for one in parameters]
            rows = None if step == 1 else torch.arange(len(quiet), ROWS)
            for parameter in parameters:
                values = self._normal(ROWS)
                if rows is not None:
                    values[quiet] = 0
                parameter.grad = self.way.gradient(values, rows)
            step_alone(like)
            after = [self._seen(like, one) for one in parameters]
            if step != 1 and not all(map(_stay, before, after)):
                return "moves rows that get no gradient"
        return ""

    def minds_listed_rows(self) -> str:
        """Whether a gradient that lists rows is taken otherwise than the plain dense one."""
        if self.way.is_listed:
            return ""
        lists = TrialWay(self.way.dtype, self.way.device, True, self.way.is_built)
        listed, plain = (
            RowTrial(self.optimizer, self.group, way, len(self.row_shape) + 1) for way in (lists, self.way)
        )
        weight = self._normal(ROWS)
        (one,), mine = listed._stepper([weight])
        (two,), theirs = plain._stepper([weight])
        with check_sparse_tensor_invariants(False):  # torch warns where an optimizer leaves that open
            for rows in (torch.arange(3), torch.arange(2, ROWS), torch.arange(3)):
                values = torch.zeros_like(weight)
                values[rows] = self._normal(ROWS)[rows]
                one.grad, two.grad = lists.gradient(values, rows), values
                step_alone(mine)
                step_alone(theirs)
        seen, there = self._seen(mine, one), self._seen(theirs, two)
        alike = seen.keys() == there.keys() and not any(value.is_sparse for value in seen.values())
        return "" if alike and all(self._alike(seen[name], there[name]) for name in seen) else "takes them otherwise"

    def keeps_elsewhere(self) -> str:
        """Looked for after some steps, as some begin to keep it then."""
        (parameter,), like = self._stepper([self._normal(ROWS)])
        for _ in range(STEPS // 2):
            parameter.grad = self.way.gradient(self._normal(ROWS))
            step_alone(like)
        place = kept_elsewhere(like, parameter)
        return place and f"keeps parameters, or numbers for their values, in {place} and not only in its state"

    def keeps_other_shapes(self) -> str:
        """Rows take state of their own size along; no other."""
        (parameter,), like = self._stepper([self._normal(ROWS)])
        for _ in range(2):
            parameter.grad = self.way.gradient(self._normal(ROWS))
            step_alone(like)
        other = [name for name, value in self._seen(like, parameter).items() if value.shape != parameter.shape]
        return f"keeps {', '.join(other)} of another shape than the matrix" if other else ""

    def ones(self) -> SmallStep:
        """A parameter of ones in no trial, with whoever steps it, and a gradient for it."""
        shape = (16, *{1: (), 2: (16,)}.get(len(self.row_shape) + 1, (4, 4, *(1,) * (len(self.row_shape) - 2))))
        (parameter,), like = self._stepper([torch.ones(shape, dtype=self.way.dtype, device=self.way.device)])
        return SmallStep(parameter, like, self.way.gradient(torch.ones_like(parameter)))

    def _stepper(self, weights: Sequence[Tensor]) -> tuple[list[nn.Parameter], Optimizer]:
        parameters = [nn.Parameter(one.clone()) for one in weights]
        return parameters, twin_to_try(self.optimizer, self.group, parameters, self.way.is_built)

    def _give(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor | None]) -> None:
        for parameter, one in zip(parameters, values, strict=True):
            parameter.grad = None if one is None else self.way.gradient(one)

    def _seen(self, like: Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The parameter and what is kept of its size."""
        state = {name: v for name, v in like.state[parameter].items() if isinstance(v, Tensor) and v.dim()}
        return {name: value.detach().clone() for name, value in {**state, "": parameter}.items()}

    def _alike(self, one: Tensor, other: Tensor) -> bool:
        rtol = TOLERANCE.get(one.dtype, ROUNDING)
        return one.shape == other.shape and torch.allclose(one, other, rtol=rtol, atol=rtol * 1e-3, equal_nan=True)

    def _normal(self, rows: int) -> Tensor:
        shape = (rows, *(self.row_shape if rows == ROWS else self.large_shape))
        real = torch.complex128 if self.way.dtype.is_complex else torch.float64
        return torch.randn(shape, generator=self.draw, dtype=real).to(self.way.device, self.way.dtype)

    def _spread(self, low: float, high: float) -> Tensor:
        """A scale for each row of a small matrix."""
        scales = torch.logspace(math.log10(low), math.log10(high), ROWS, dtype=torch.float64)
        return scales.view(ROWS, *(1 for _ in self.row_shape)).to(self.way.device)

    def _weights(self) -> list[Tensor]:
        """Positive; signed; to get a gradient that is orthogonal as a whole; in some rows; with rows of zeros; with
        rows of unlike scales; large."""
        positive, signed, whole, rows, zeros, unlike = (self._normal(ROWS) for _ in range(6))
        zeros[:CUT] = 0
        scaled = (unlike * self._spread(1e3, 1e-3)).to(unlike.dtype)
        return [positive.abs().to(signed.dtype) + 0.5, signed, whole, rows, zeros, scaled, self._normal(LARGE_ROWS)]

    def _gradients(self, weights: Sequence[nn.Parameter], step: int) -> Gradients:
        """Those of a step, by what the weights are now. Later ones are of the second matrix alone."""
        scale = FIRST_SCALE * 10.0 ** min(step, STEPS - 1)
        if step >= STEPS:
            return [self._normal(ROWS) * scale if n == 1 else None for n in range(len(weights))]
        with torch.no_grad():
            positive, signed, whole, rows, zeros, unlike = (self._normal(ROWS) for _ in range(6))
            whole = _nearly_across(whole.flatten(), weights[2].flatten()).view_as(whole)
            beside = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
            rows = weights[3] + rows
            rows[:CUT] = torch.stack(
                [_nearly_across(one, to.flatten()) for one, to in zip(beside[:CUT], weights[3][:CUT], strict=True)]
            ).view_as(rows[:CUT])
            zeros[CUT:] *= step % 2
            unlike = (unlike * self._spread(1e-2, 1e2)).to(unlike.dtype)
            positive = positive.abs().to(signed.dtype)
        small = [positive, signed, whole, rows, zeros, unlike]
        return [one * scale for one in small] + [self._normal(LARGE_ROWS) * scale if step < LARGE_STEPS else None]


def _nearly_across(one: Tensor, other: Tensor) -> Tensor:
    """A vector with little of it along another."""
    unit = other / (other.norm() + 1e-30)
    across: Tensor = one - unit * torch.vdot(unit, one)
    nearly: Tensor = across + unit * (COSINE * across.norm())
    return nearly


def _stay(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Whether the first half of the rows is as it was; state begins as zeros."""
    half = ROWS // 2
    return all(
        value.is_sparse or torch.equal(value[:half], before.get(name, torch.zeros_like(value))[:half])
        for name, value in after.items()
    )


DIFFERS = "steps a matrix whole differently from the same matrix split by row"
JOINS = "steps several parameters together differently from each apart"
CLOSURE = "steps by a closure alone, so it cannot be tried"


def why_not_by_row(optimizer: Optimizer, group: Options, like: Tensor | None = None) -> str:
    """Why its steps of a whole matrix are not those of its rows, each piece with an optimizer of its own as on ranks of
    their own; empty if they are, as of element-wise optimizers.

    Args:
        like: the parameter that is meant; of its dimensions the trial's are. None: the group's first.
    """
    questions = {
        "by row": lambda trial: trial.apart(by_row, DIFFERS),
        "whole": RowTrial.keeps_elsewhere, "state": RowTrial.keeps_other_shapes,
    }  # fmt: skip
    return next(filter(None, (str(_answer(optimizer, group, like, *one)) for one in questions.items())), "")


def steps_by_row(optimizer: Optimizer, group: Options, like: Tensor | None = None) -> bool:
    return not why_not_by_row(optimizer, group, like)


def why_whole(optimizer: Optimizer, group: Options, like: Tensor | None = None) -> str:
    """Why it cannot be given another tensor in the parameter's place, of which it keeps nothing but groups and state;
    empty if it can."""
    return str(_answer(optimizer, group, like, "whole", RowTrial.keeps_elsewhere))


def why_not_by_parameter(optimizer: Optimizer, group: Options) -> str:
    """Why stepping several parameters together is not stepping each apart; empty if it is."""
    return str(_answer(optimizer, group, None, "by parameter", lambda trial: trial.apart(by_parameter, JOINS)))


def leaves_untouched_rows(optimizer: Optimizer, group: Options, like: Tensor | None = None) -> bool:
    """Whether a row whose gradient is zero stays where it is, whatever its history, and its state too (RMSprop leaves
    the row but not its state)."""
    return not _answer(optimizer, group, like, "quiet rows", RowTrial.moves_quiet_rows)


def takes_listed_rows(optimizer: Optimizer, group: Options, like: Tensor | None = None) -> bool:
    """Whether a gradient that lists its rows moves a matrix as the plain dense one does, and all state is dense; or it
    takes no other (SparseAdam)."""
    return not _answer(optimizer, group, like, "listed", RowTrial.minds_listed_rows)


def wants_listed_rows(optimizer: Optimizer, group: Options, like: Tensor | None = None) -> bool:
    """Whether it takes only gradients that list their rows, and steps no others (SparseAdam)."""
    return not _answer(optimizer, group, like, "wants listed", lambda trial: "" if trial.way.is_listed else "any")


def stepped_ones(optimizer: Optimizer, group: Options, like: Tensor) -> SmallStep | None:
    """A small parameter to look at what its step keeps and makes; None where it cannot be tried."""
    found = _asked(optimizer, group, like, {}, "ones", RowTrial.ones)
    return found if isinstance(found, SmallStep) else None


_ANSWERS: weakref.WeakKeyDictionary[Optimizer | type[Optimizer], dict[Any, Any]] = weakref.WeakKeyDictionary()


def _answer(
    optimizer: Optimizer, group: Options, like: Tensor | None, question: str, ask: Callable[[RowTrial], Any]
) -> Any:
    """What a trial answers, of yes or no empty for yes; asked once for the same options, whatever the learning rate.

    An exception of any class is an answer, too, in its own words.
    """
    like = next(iter(group["params"]), torch.empty(0, 0)) if like is None else like
    told = _ANSWERS.setdefault(_whose(optimizer), {})
    options = repr([(name, one) for name, one in group.items() if name not in ("params", "lr")])
    key = (type(optimizer).step, bool(optimizer.state), like.dim(), like.dtype, like.device, options)
    if (key, question) not in told:
        told[key, question] = _asked(optimizer, group, like, told, key, ask)
    return told[key, question]


def _whose(optimizer: Optimizer) -> Optimizer | type[Optimizer]:
    """Of whom an answer is: of all optimizers of a class of torch's, which a process may attach many times; else of
    this one, as others may have attributes that change what its step does."""
    kind = type(optimizer)
    return kind if getattr(torch.optim, kind.__name__, None) is kind else optimizer


def _asked(
    optimizer: Optimizer, group: Options, like: Tensor, told: dict[Any, Any], key: Any, ask: Callable[[RowTrial], Any]
) -> Any:
    if wants_closure(optimizer):
        return CLOSURE
    with tried_alone():
        if key not in told:
            told[key] = _way(optimizer, group, like)
        way = told[key]
        if isinstance(way, str):
            return way
        try:
            return ask(RowTrial(optimizer, group, way, max(1, like.dim())))
        except Exception as error:
            return _said(error)


def _said(error: Exception) -> str:
    if isinstance(error, AsksOthers):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"cannot be tried on a small matrix ({type(error).__name__}: {lines[0]})"


def _way(optimizer: Optimizer, group: Options, like: Tensor) -> TrialWay | str:
    """The first in which it steps a small matrix; else what it raised in the first.

    Where the optimizer has state, what its constructor makes comes first: Adagrad would step without, but its first
    step would then fill rows that in training were full before.
    """
    exact = torch.complex128 if like.is_complex() else torch.float64
    kinds = dict.fromkeys([(exact, torch.device("cpu")), (like.dtype, _real(like.device))])
    why = ""
    builds = (True, False) if optimizer.state else (False, True)
    for (dtype, device), is_listed, is_built in product(kinds, (False, True), builds):
        way = TrialWay(dtype, device, is_listed, is_built)
        try:
            RowTrial(optimizer, group, way, max(1, like.dim())).begin()
        except Exception as error:
            why = why or _said(error)
            if isinstance(error, AsksOthers):
                return why
            continue
        return way
    return why


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device
