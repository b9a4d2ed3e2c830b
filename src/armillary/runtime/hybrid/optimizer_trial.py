"""Finds out what an optimizer does to the rows of a matrix by trying it on small tensors, never by its type.

A rank that owns rows steps them with an optimizer of its own, which sees neither the other rows nor their gradients. So
that is exact only if stepping a matrix whole and stepping its pieces apart give the same (`row_trial.py` says on what
that is tried). Whatever a trial raises is an answer: such an optimizer is not known to step by row.
"""

import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from armillary.runtime.hybrid.optimizer_twin import AsksOthers, Options, tried_alone, wants_closure
from armillary.runtime.hybrid.row_trial import RowTrial, SmallStep, TrialWay, by_parameter, by_row

__all__ = [
    "leaves_untouched_rows", "stepped_ones", "steps_by_row", "takes_listed_rows", "wants_listed_rows",
    "why_not_by_parameter", "why_not_by_row", "why_whole",
]  # fmt: skip

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


_ANSWERS: weakref.WeakKeyDictionary[Optimizer, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _answer(
    optimizer: Optimizer, group: Options, like: Tensor | None, question: str, ask: Callable[[RowTrial], Any]
) -> Any:
    """What a trial answers, of yes or no empty for yes; asked once for the same options, whatever the learning rate.

    An exception of any class is an answer, too, in its own words.
    """
    like = next(iter(group["params"]), torch.empty(0, 0)) if like is None else like
    told = _ANSWERS.setdefault(optimizer, {})
    key = (like.dim(), like.dtype, repr([(name, one) for name, one in group.items() if name not in ("params", "lr")]))
    if (key, question) not in told:
        told[key, question] = _asked(optimizer, group, like, told, key, ask)
    return told[key, question]


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
