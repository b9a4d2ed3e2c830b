"""One training step of a model under watch, and a few by the clock: what a profile takes from running it.

Stages are timed on all ranks at once, because ranks that share cores share them in training too. Every rank steps on a
batch of its own, in rounds that begin together and are long enough that ranks take turns on the cores. A round has as
many steps on every rank, for models with collectives of their own. It is as long as its slowest rank took: two ranks
that were held up by turns took 302 ms in the median each, and 321 so counted. The middle half of the rounds counts:
what else the machine did is no part of a step.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from armillary.models.preserved_state import LiveBytes, untouched
from armillary.models.structure import OUTSIDE, following
from armillary.plans.parcel import touched_rows
from armillary.plans.profile import Profile
from armillary.profiler.access_patterns import NO_LOOKUPS, Lookups, Reading, WatchReads
from armillary.profiler.stages import Activations, CountOperations, StageClock, gathering
from armillary.transport.transport import Transport

__all__ = [
    "UNSEEN",
    "Loss",
    "StageTimes",
    "has_unseen_reader",
    "probe",
    "profile_concurrently",
    "rates_at_once",
    "rows_of",
    "scalar_loss",
    "stage_seconds",
    "step_bytes",
    "timed_step",
]

Result = TypeVar("Result")

Loss = Callable[[nn.Module, Any], Tensor]
StageTimes = dict[str, tuple[float, float]]

TIMED_STEPS = 3
RATED_ROUNDS = 6  # the first warms up
ALIKE = 1.25  # times the fastest rank's seconds: less is no difference
OPTIMIZER_COPIES, WRITTEN_BYTES = 4, 1 << 27  # weight, gradient and two of state; more than caches hold
UNSEEN = "an operation the dispatcher does not show"


def scalar_loss(value: object) -> Tensor:
    """The loss, if it is one."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"profile: loss returned {what}; want a scalar tensor, as a mean over the batch is")
    return value


def _backward(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ValueError("profile: the loss depends on no parameter that requires a gradient; check requires_grad")
    loss.backward()


def probe(
    model: nn.Module, batch: Any, loss: Loss, watch: WatchReads, paths: Sequence[str]
) -> tuple[dict[str, int], CountOperations, Counter[str]]:
    """One step under watch.

    Returns:
        The place of each gradient in the order in which they became final; operations of the forward pass, and bytes
        returned, by stage; bytes kept for the backward pass by stage.
    """
    operations = CountOperations()
    activations = Activations(model, lambda: operations.path[-1])
    hooks = saved_tensors_hooks(activations.pack, lambda tensor: tensor)
    with following(model, paths, operations.enter, operations.leave), watch, operations, hooks:
        value = scalar_loss(loss(model, batch))
    activations.let_go()
    watch.counts_lookups = False
    with watch, _arriving(watch.readings) as order:
        _backward(value)
    watch.counts_lookups = True
    looked = watch.pending()
    for name, reading in watch.readings.items():
        if reading.parameter.grad is not None:
            if has_unseen_reader(reading, looked.get(name, NO_LOOKUPS)):
                reading.dense.add(UNSEEN)
            reading.parameter.grad = None
    return {name: place for place, name in enumerate(order)}, operations, activations.bytes


@contextmanager
def _arriving(readings: Mapping[str, Reading]) -> Iterator[dict[str, None]]:
    """The names of parameters in the order in which their gradients become final (a dict, for its order)."""
    order: dict[str, None] = {}
    handles = []
    for name, reading in readings.items():
        if reading.parameter.requires_grad:

            def arrived(_: Tensor, name: str = name) -> None:
                order.pop(name, None)  # a nested backward pass brings a part of it early: the last one counts
                order[name] = None

            hook = reading.parameter.register_post_accumulate_grad_hook(arrived)
            handles.append(hook)
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()


def has_unseen_reader(reading: Reading, lookups: Lookups) -> bool:
    """Whether the gradient reaches further than the reads seen.

    A custom kernel can read behind the dispatcher's back. A gradient's values can only refute that a table is
    read by row, never suggest it.
    """
    gradient = reading.parameter.grad
    if gradient is None or reading.dense:
        return False
    if not reading.gathers:
        return True
    return not bool(torch.isin(rows_of(gradient), lookups.rows).all())


def rows_of(gradient: Tensor) -> Tensor:
    """Numbers of the rows that are not zero, on the CPU; of one that lists its rows, those listed."""
    if gradient.is_sparse:
        return gradient._indices()[0].cpu()  # equal ones are still to be merged
    return touched_rows(gradient).cpu()


def stage_seconds(
    model: nn.Module, batch: Any, loss: Loss, paths: Sequence[str], tables: Collection[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Forward and backward seconds by stage: medians over a few steps, each after the first has warmed up.

    Between two of them as many bytes are written as an optimizer writes there, so that a step finds the caches as it
    does in training: of a small vision transformer it took 5 % longer than with warm ones.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    nbytes = min(WRITTEN_BYTES, OPTIMIZER_COPIES * sum(parameter.nbytes for parameter in trained))
    written = torch.zeros(nbytes, dtype=torch.uint8, device=trained[0].device if trained else None)
    steps = []
    for _ in range(TIMED_STEPS):
        written.add_(1)
        steps.append(timed_step(model, batch, loss, paths, tables))
    forward = {stage: statistics.median(step[stage][0] for step in steps) for stage in steps[0]}
    return forward, {stage: statistics.median(step[stage][1] for step in steps) for stage in steps[0]}


def timed_step(model: nn.Module, batch: Any, loss: Loss, paths: Sequence[str], tables: Collection[str]) -> StageTimes:
    """One step by the clock: (forward, backward) seconds by stage; what is outside all stages is one, too.

    Args:
        tables: names of parameters that owners could hold; their look-ups end at rows (`stages.py`), unless the
            model asks more of one than an owned table answers: then the step is timed as it is.
    """
    return _gathering(model, tables, lambda: _timed_step(model, batch, loss, paths))


def step_bytes(model: nn.Module, batch: Any, loss: Loss, tables: Collection[str]) -> int:
    """The most bytes of tensors that a step makes and holds at once. Each gradient goes when it is final, as a run puts
    it where it has room for it.

    Args:
        tables: as in `timed_step`.
    """

    def let_go(parameter: Tensor) -> None:
        parameter.grad = None

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(let_go) for parameter in trained]
    try:
        return _gathering(model, tables, lambda: _step_bytes(model, batch, loss))
    finally:
        for hook in hooks:
            hook.remove()


def _gathering(model: nn.Module, tables: Collection[str], step: Callable[[], Result]) -> Result:
    try:
        with gathering(model, tables):
            return step()
    except Exception:
        if not tables:
            raise
        return step()


def _step_bytes(model: nn.Module, batch: Any, loss: Loss) -> int:
    live = LiveBytes()
    with live:
        _backward(scalar_loss(loss(model, batch)))
    return live.most_bytes


def _timed_step(model: nn.Module, batch: Any, loss: Loss, paths: Sequence[str]) -> StageTimes:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    clock = StageClock(device)
    with following(model, paths, clock.enter, clock.leave):
        value = loss(model, batch)
        clock.begin_backward()
        _backward(value)
    clock.end()
    for parameter in model.parameters():
        parameter.grad = None
    return {stage: (clock.forward[stage], clock.backward[stage]) for stage in (*paths, OUTSIDE)}


ROUND_SECONDS = 0.01  # a few slices of a scheduler
ENOUGH_SECONDS, FEWEST_ROUNDS, ENOUGH_STEPS = 1.0, 6, 32


def profile_concurrently(
    found: Profile, model: nn.Module, draw: Callable[[], Any], loss: Loss, transport: Transport
) -> Profile:
    """The profile with the stage times of this job: means over rounds, each of the rank that took longest in it. Every
    rank must call it; all get the same profile, and the model stays as it was.

    Args:
        found: of this model. draw: gives a batch of this rank.

    Raises:
        ValueError: a rank drew no batch or its step failed; on every rank.
    """
    batch: Any = None

    def step() -> StageTimes:
        return _timed(found, model, batch, loss)

    def warm_up() -> _Round:
        nonlocal batch
        batch = draw()
        step()
        return _Round(step(), 1)

    first = _slowest(warm_up, transport)
    each = max(1, math.ceil(ROUND_SECONDS / max(_total(first.times), 1e-9)))
    times = _middle(_rounds(step, min(each, ENOUGH_STEPS), transport))
    stages = []
    for stage in found.stages:
        forward, backward = times[stage.name]
        stages.append(replace(stage, forward_seconds=forward, backward_seconds=backward))
    return replace(found, stages=tuple(stages))


def rates_at_once(
    found: Profile, model: nn.Module, draw: Callable[[], Any], loss: Loss, transport: Transport
) -> tuple[float, ...]:
    """By rank, seconds of its step over those of the fastest, all timed at once; the shortest of a few rounds of each.
    Empty where all are alike. Collective; see `profile_concurrently`."""
    batch: Any = None

    def step() -> _Round:
        nonlocal batch
        batch = draw() if batch is None else batch
        return _Round(_timed(found, model, batch, loss), 1)

    rounds = [[_total(one.times) for one in _everyones(step, transport)] for _ in range(RATED_ROUNDS)]
    seconds = [min(theirs) for theirs in zip(*rounds[1:], strict=True)]
    rates = tuple(max(1.0, round(one / max(min(seconds), 1e-9), 2)) for one in seconds)
    return rates if max(rates) > ALIKE else ()


class _Round(NamedTuple):
    """Of one rank: its mean step, and how many it took."""

    times: StageTimes
    steps: int


def _slowest(work: Callable[[], _Round], transport: Transport) -> _Round:
    """Collective."""
    return max(_everyones(work, transport), key=lambda one: _total(one.times))


def _everyones(work: Callable[[], _Round], transport: Transport) -> list[_Round]:
    """Collective, by rank. A rank that fails must not leave the others waiting for it."""
    mine, trouble = None, ""
    try:
        mine = work()
    except Exception as error:
        trouble = f"{type(error).__name__}: {error}"
    everyones: list[tuple[_Round | None, str]] = transport.share((mine, trouble))
    if failed := [f"rank {rank}: {said}" for rank, (_, said) in enumerate(everyones) if said]:
        raise ValueError(f"profile: a step failed on {failed[0]}")
    return [one for one, _ in everyones if one is not None]


def _rounds(step: Callable[[], StageTimes], each: int, transport: Transport) -> list[StageTimes]:
    """Of each round of so many steps the mean step of the slowest rank. There are enough when they took a second, or
    are many steps of a small model."""

    def play() -> _Round:
        return _Round(_mean([step() for _ in range(each)]), each)

    found = list[StageTimes]()
    steps, seconds = 0, 0.0
    while len(found) < FEWEST_ROUNDS or (seconds < ENOUGH_SECONDS and steps < ENOUGH_STEPS):
        slowest = _slowest(play, transport)
        found.append(slowest.times)
        steps += slowest.steps
        seconds += slowest.steps * _total(slowest.times)
    return found


def _middle(rounds: list[StageTimes]) -> StageTimes:
    """The mean of those that are neither among the shortest quarter nor the longest."""
    aside = len(rounds) // 4
    return _mean(sorted(rounds, key=_total)[aside : len(rounds) - aside])


def _mean(times: list[StageTimes]) -> StageTimes:
    return {stage: (fmean(one[stage][0] for one in times), fmean(one[stage][1] for one in times)) for stage in times[0]}


def _timed(found: Profile, model: nn.Module, batch: Any, loss: Loss) -> StageTimes:
    parameters = dict(model.named_parameters())
    with untouched(model) as kept, torch.enable_grad():
        for fact in found.parameters:
            if fact.is_rewritten:
                kept.keep(parameters[fact.name])
        paths = [stage.name for stage in found.stages if stage.name != OUTSIDE]
        return timed_step(model, batch, loss, paths, [fact.name for fact in found.parameters if fact.shardable])


def _total(times: StageTimes) -> float:
    return sum(forward + backward for forward, backward in times.values())
