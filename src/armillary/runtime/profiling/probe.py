"""One training step of a model under watch, and a few by the clock: what a profile takes from running it.

Every reader and every gradient of the step is seen here; what they add up to is the profiler's business.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from armillary.exchanges.parcel import touched_rows
from armillary.facts.live_bytes import LiveBytes
from armillary.facts.stage_paths import OUTSIDE, following
from armillary.runtime.profiling.gathered_rows import gathering
from armillary.runtime.profiling.reads import Reading, WatchReads
from armillary.runtime.profiling.row_counts import NO_LOOKUPS, Lookups
from armillary.runtime.profiling.stage_clock import StageClock
from armillary.runtime.profiling.stage_costs import Activations, CountOperations

__all__ = [
    "UNSEEN", "Loss", "StageTimes", "has_unseen_reader", "probe", "rows_of", "scalar_loss", "stage_seconds",
    "step_bytes", "timed_step",
]  # fmt: skip

Result = TypeVar("Result")

Loss = Callable[[nn.Module, Any], Tensor]
StageTimes = dict[str, tuple[float, float]]

TIMED_STEPS = 3
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
        tables: names of parameters that owners could hold; their look-ups end at rows (`gathered_rows.py`), unless the
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
