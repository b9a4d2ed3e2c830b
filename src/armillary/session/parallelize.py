"""The short way: measure, profile, plan and attach in one call, for a script that has its own loop; and its parts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import nn
from torch.optim import Optimizer

from armillary.facts.plan import SIMULTANEOUS, Choice, Mean
from armillary.facts.topology import Topology
from armillary.planning.constraints import Constraint
from armillary.planning.planner import NO_CONSTRAINTS
from armillary.runtime.hybrid.optimizers import as_one
from armillary.runtime.measure import measure as measure_links
from armillary.runtime.patience import Patience
from armillary.runtime.watch.probe import Loss
from armillary.session.attach import attach
from armillary.session.decide import PROFILED_STEPS, Subject, Wishes, decide, open_transport
from armillary.session.events import Decided
from armillary.session.run import Run

__all__ = ["auto_plan", "measure", "parallelize"]


def measure() -> Topology:
    """What this job runs on: nodes, links, memory. Takes a second or two; every rank must call it."""
    transport = open_transport()
    topology = measure_links(transport)
    transport.close()
    return topology


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    batches: Iterable[Any],
    loss: Loss,
    *,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    lazy: Sequence[str] = (),
    mean: Mean = "workers",
    schedule: Choice = SIMULTANEOUS,
    prefetch: bool = False,
    autotune: int = 0,
    steps_by_run: bool = False,
    micro_batches: int | None = None,
    scaler: Any = None,
    report_after: float | None = 60.0,
    timeout: float = 600.0,
    check_order: bool = False,
    check_data: bool = True,
    broadcast_buffers: bool = True,
    process_group: Any = None,
) -> Run:
    """Plans for this job and attaches the plan; the training loop stays as it was. Every rank must call it.

    Args:
        batches, loss, and all up to micro_batches: as in `auto_plan`.
        scaler, report_after, timeout, check_order, check_data, broadcast_buffers, process_group: as in `attach`.

    Raises:
        ValueError: too few batches, a constraint that cannot be honoured, or a model or optimizer that does not fit.
    """
    subject = Subject(model, as_one(optimizer), loss, _drawn(batches))
    wishes = Wishes(
        constraints, lazy, schedule=schedule, mean=mean, trials=autotune, prefetch=prefetch,
        steps_by_run=steps_by_run, micro_batches=micro_batches,
    )  # fmt: skip
    decided = decide(subject, wishes, process_group, Patience(report_after, timeout))
    return attach(
        decided.plan, model, optimizer, loss=loss, example=next(iter(subject.draw(1))), topology=decided.topology,
        scaler=scaler, report_after=report_after, timeout=timeout, check_order=check_order, check_data=check_data,
        broadcast_buffers=broadcast_buffers, process_group=process_group,
    )  # fmt: skip


def auto_plan(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    batches: Iterable[Any],
    loss: Loss,
    *,
    constraints: Mapping[str, Constraint] = NO_CONSTRAINTS,
    lazy: Sequence[str] = (),
    mean: Mean = "workers",
    schedule: Choice = SIMULTANEOUS,
    prefetch: bool = False,
    autotune: int = 0,
    steps_by_run: bool = False,
    micro_batches: int | None = None,
) -> Decided:
    """Measures this job, profiles the model and plans: `.topology`, `.profile` and `.plan`, the same on every rank, as
    `attach` and `run.rebalance` want them. Model and optimizer stay as they were. Every rank must call it. (What ranks
    measure and profile each for themselves differs, and so would their plans.)

    Args:
        batches: as one worker sees them; two a worker are drawn, one at least, and none is trained on. A loader does.
        loss: loss(model, batch) -> scalar tensor.
        constraints, lazy, mean, schedule, steps_by_run, micro_batches: as in `plan`; under mean "weights" the loop
            declares them (`run.weigh`).
        prefetch: plan for a loop over `run.batches`, which is then some batches ahead of the training. The same
            training, bit for bit. Without, the plan's notes say what it would bring.
        autotune: how many of the best plans are timed in this job, on copies of the model for a dozen steps each; the
            fastest is taken, and its notes hold the figures. Fewer than 2: none.

    Raises:
        ValueError: too few batches, or a constraint or schedule that cannot be honoured.
    """
    wishes = Wishes(
        constraints, lazy, schedule=schedule, mean=mean, trials=autotune, prefetch=prefetch,
        steps_by_run=steps_by_run, micro_batches=micro_batches,
    )  # fmt: skip
    return decide(Subject(model, as_one(optimizer), loss, _drawn(batches)), wishes)


def _drawn(batches: Iterable[Any]) -> Callable[[int], list[Any]]:
    """As many as a profile for so many workers reads, each drawn once: the iterable may be endless."""
    source, drawn = iter(batches), list[Any]()

    def draw(workers: int) -> list[Any]:
        drawn.extend(islice(source, max(0, PROFILED_STEPS * workers - len(drawn))))
        if not drawn:
            raise ValueError("parallelize: batches gave nothing; give a few, at least one per worker")
        return drawn

    return draw
