"""What is to be trained, and what its optimizer is taken to keep and to move, found by trying it out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.models.preserved_state import LiveBytes
from armillary.planning.link_costs import Upkeep
from armillary.planning.pricing import Assumptions
from armillary.profiler.probe import Loss
from armillary.session.workload import Batch
from armillary.tables.optimizer_trial import (
    SmallStep,
    leaves_untouched_rows,
    stepped_ones,
    wants_listed_rows,
    why_not_by_row,
    why_whole,
)
from armillary.tables.optimizers import as_one, members, tried_alone

__all__ = ["ModelToPlan", "assumptions_of"]


@dataclass(frozen=True)
class ModelToPlan:
    """What is to be trained. draw: workers -> some batches, at least one each, in the order of `profile`; rank 0 looks
    at all of them, every rank is timed with its own. stages: modules that a cut may begin with; none: the children."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    draw: Callable[[int], Iterable[Batch]]
    stages: Sequence[str] = ()


def assumptions_of(optimizer: Optimizer | Sequence[Optimizer], model: nn.Module | None = None) -> Assumptions:
    """What the optimizer keeps per parameter, what it needs for a moment, and whether it moves rows without gradient,
    found by trying it out. One that steps by a closure alone cannot be tried, and counts as Adam.

    Args:
        optimizer: of several, and of groups with other options, the most is assumed of every parameter.
        model: what they train. Each of its parameters is then assumed to be kept as its own group keeps it.

    Raises:
        ValueError: the model has none of the optimizer's parameters.
    """
    kinds = [
        (options, like, _of_kind(one, options, like))
        for one in members(as_one(optimizer))
        for options in one.param_groups
        for like in {parameter.dim(): parameter for parameter in options["params"]}.values()
    ]
    found = [upkeep for _, _, upkeep in kinds]
    if not found:
        raise ValueError("assumptions_of: the optimizer holds no parameter")
    reasons = {(upkeep.mixes_rows, upkeep.stays_whole) for upkeep in found}
    most = Upkeep(
        optimizer_slots=max(one.optimizer_slots for one in found),
        moves_quiet_rows=any(one.moves_quiet_rows for one in found),
        step_slots=max(one.step_slots for one in found),
        mixes_rows=max(reasons)[0] if model is None or len(reasons) == 1 else "",
        lists_rows=all(one.lists_rows for one in found),
        stays_whole=max(reasons)[1] if model is None or len(reasons) == 1 else "",
    )
    if model is None:
        return Assumptions(**asdict(most))
    names = {parameter: name for name, parameter in model.named_parameters()}
    kept = {
        names[p]: upkeep
        for options, like, upkeep in kinds
        for p in options["params"]
        if p in names and p.dim() == like.dim()
    }
    if not kept:
        raise ValueError(
            "assumptions_of: no tensor of the optimizer is a parameter of this model; give the model that it trains"
        )
    return Assumptions(**asdict(most), own={name: upkeep for name, upkeep in kept.items() if upkeep != most})


def _of_kind(optimizer: Optimizer, options: dict[str, Any], like: Tensor) -> Upkeep:
    """Of the parameters of a group that have as many dimensions as this one."""
    mixes, whole = (ask(optimizer, options, like) for ask in (why_not_by_row, why_whole))
    mixes, whole = (why and f"{type(optimizer).__name__} {why}" for why in (mixes, whole))
    tried = stepped_ones(optimizer, options, like)
    if tried is None:
        return Upkeep(mixes_rows=mixes, stays_whole=whole)  # Adam's
    temporary_bytes = _second_step_bytes(tried)
    kept = ((p, optimizer.state[p]) for p in options["params"] if p.dim() and optimizer.state.get(p))
    parameter, state = next(kept, (tried.parameter, tried.optimizer.state[tried.parameter]))
    return Upkeep(
        optimizer_slots=sum(isinstance(one, Tensor) and one.shape == parameter.shape for one in state.values()),
        moves_quiet_rows=not leaves_untouched_rows(optimizer, options, like),
        step_slots=float(temporary_bytes // tried.parameter.nbytes),
        mixes_rows=mixes,
        lists_rows=wants_listed_rows(optimizer, options, like),
        stays_whole=whole,
    )


def _second_step_bytes(tried: SmallStep) -> int:
    """The most bytes that were made in it and are no state."""
    live = LiveBytes()
    with tried_alone():
        for _ in range(2):
            tried.parameter.grad = tried.gradient.clone()
            with live:
                live.mark()
                tried.optimizer.step()
    return live.added_bytes
