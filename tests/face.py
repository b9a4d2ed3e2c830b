"""The one test file that knows how the library is spelt today. Tests of outcomes speak through it.

It speaks as the library is to be spoken to: one run for every plan, schedules by the names of the registry
(simultaneous, accumulation, gpipe, one_f_one_b, one_device, pipeline, ring, zero_ring, shared_stages,
delayed_all_reduce). Where the library is spelt otherwise today, this file translates.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import armillary
from armillary.plans import Link
from armillary.tables.handle import TableHandle
from forked import Ended
from forked import command as forked_command

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass
class Started:
    """A run, and what its tests ask of it. losses: of the steps that are complete, in order, as they came."""

    run: armillary.Run
    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    steps: int = 0
    losses: list[tuple[float, ...]] = field(default_factory=list)
    told_bytes: float = 0.0

    @property
    def rank(self) -> int:
        return self.run.rank

    @property
    def workers(self) -> int:
        return self.run.workers

    @property
    def plan(self) -> armillary.Plan:
        return self.run.plan


# Plans


def schedule_named(text: str) -> armillary.Choice:
    """ "ring(slack=1)" as the plan wants it."""
    return armillary.Choice.parse(text)


def machines(workers: int, per_node: int = 0) -> armillary.Topology:
    """Workers on one node, or on nodes of `per_node`; links of 0.1 ms and 100 MB/s."""
    link, each = Link(1e-4, 1e8), per_node or workers
    return armillary.Topology(workers // each, each, link, link, 1 << 33)


def plan_for(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Batch],
    workers: int,
    *,
    schedule: str = "simultaneous",
    exchange: Mapping[str, str] | None = None,
    per_node: int = 0,
    prefetch: bool = False,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    **asked: Any,
) -> armillary.Plan:
    """A plan for this model on so many workers, made in this process.

    Args:
        batches: one a worker at least.
        exchange: parameter or pattern -> placement or exchange that it must have.
        prefetch: rows of the next batches are asked for early.
        asked: lazy, mean.
    """
    places = machines(workers, per_node)
    nodes = {"workers_per_node": places.workers_per_node}
    seen = armillary.profile(model, batches, loss, workers=workers, **nodes)
    more = {} if optimizer is None else {"assumptions": armillary.assumptions_of(optimizer, model)}
    way = {"constraints": exchange or {}, "schedule": schedule_named(schedule), "prefetch": prefetch}
    return armillary.plan(seen, places, **way, **asked, **more)


def sent_bytes_planned(plan: armillary.Plan) -> float:
    """Of one worker in one step: the mean over workers."""
    return plan.forecast.sent_bytes


def exchanges_of(plan: armillary.Plan) -> dict[str, str]:
    """Parameter -> name of the exchange of its group."""
    return {parameter: group.exchange.name for group in plan.groups for parameter in group.parameters}


def departures_of(plan: armillary.Plan) -> set[str]:
    """In which ways it differs from training in one process: stale, lazy, lossy, ...; none where it is exact."""
    return set(plan.departures)


# Runs


def start(
    plan: armillary.Plan,
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    example: Batch = None,
    seed: int = 0,
    timeout: float = 600.0,
    report_after: float | None = None,
    **asked: Any,
) -> Started:
    """Collective: puts the plan to work. `example` is a micro-batch, wanted where the schedule owns the loop.

    Args:
        report_after: a wait that lasts longer says who stands where; timeout: it ends in an error then.
        asked: check_data, broadcast_buffers.
    """
    given = {"example": example, "seed": seed, "timeout": timeout, "report_after": report_after, **asked}
    run = armillary.attach(plan, model, optimizer, loss=loss, **given)
    return Started(run, model, optimizer, loss)


def resume(
    path: Path,
    plan: armillary.Plan,
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    example: Batch = None,
    seed: int = 0,
) -> tuple[Started, dict[str, Any]]:
    """Collective: starts with what was saved, under this plan or any other; and what the loop had saved."""
    run = start(plan, model, optimizer, loss, example, seed)
    return run, load(run, path)


def parallelize(model: nn.Module, optimizer: Optimizer, batches: Iterable[Batch], loss: Loss, **asked: Any) -> Started:
    """Collective: measures, profiles, plans and starts."""
    return Started(armillary.parallelize(model, optimizer, batches, loss, **asked), model, optimizer, loss)


def own(run: Started, batches: Sequence[Batch]) -> Sequence[Batch]:
    """Of all the micro-batches of a step, worker by worker, those that this rank hands in."""
    mesh = run.plan.mesh
    each = len(batches) // mesh.data_coordinates
    return batches[each * mesh.data_coordinate(run.rank) :][:each]


def step(run: Started, batches: Sequence[Batch]) -> list[tuple[float, ...]]:
    """One training step on this rank's micro-batches; the losses of the steps that are complete by now."""
    new = [tuple(float(loss) for loss in one.losses) for one in run.run.step(batches)]
    run.steps += 1
    run.losses += new
    return new


def losses(run: Started) -> list[tuple[float, ...]]:
    """The losses of the steps that were told, in order; the last steps may still be under way."""
    return run.losses


def weights(run: Started) -> dict[str, Tensor]:
    """Collective: finishes what is under way; the whole newest state_dict on every rank, copies on the CPU. What is
    kept on every rank is this rank's own."""
    whole = _from_rank_zero((run.run.export() or {"model": {}})["model"])
    (mine,) = evaluate(run, lambda model, _: _readable(model), [None])
    return {key: whole[key].clone() if value is None else value for key, value in mine.items()}


def _readable(model: nn.Module) -> dict[str, Tensor | None]:
    """None for a table whose rows are spread over the ranks."""
    values = model.state_dict().items()
    return {key: None if isinstance(value, TableHandle) else value.detach().cpu().clone() for key, value in values}


def _from_rank_zero(value: Any) -> Any:
    everyones = [value]
    dist.broadcast_object_list(everyones, src=0)
    return everyones[0]


def save(run: Started, folder: Path, loop: Mapping[str, Any] | None = None, keep: int = 3) -> Path:
    """Collective: writes a checkpoint below `folder`; its path."""
    return run.run.save(folder, loop=loop, keep=keep)


def load(run: Started, path: Path) -> dict[str, Any]:
    """Collective: puts what was saved into a run; what this rank's loop had saved."""
    return run.run.load(path)


def latest_checkpoint(folder: Path) -> Path | None:
    return armillary.latest_checkpoint(folder)


def export(run: Started) -> dict[str, Any] | None:
    """Collective: plain state_dicts of "model" and "optimizer" on rank 0, None elsewhere."""
    return run.run.export()


def ema(run: Started, decay: float) -> Any:
    """Collective: a moving average of all parameters. It has update(), which asks nobody, and collective shown(), a
    with-block in which the model holds averages, and export(), a state_dict on rank 0."""
    return run.run.ema(decay)


def evaluate(run: Started, look: Callable[[nn.Module, Batch], Any], batches: Iterable[Batch]) -> list[Any]:
    """Collective: look(model, batch) at the newest weights, in evaluation mode; training goes on unchanged."""
    seen: list[Any] = []

    def noted(model: nn.Module, batch: Batch) -> dict[str, float]:
        seen.append(look(model, batch))
        return {"batches": 1.0}

    totals = run.run.evaluate(batches, noted)
    replicas = run.plan.mesh.data_coordinates  # where ranks of a replica are given the same, it counts once
    assert totals["batches"] in (float(len(seen) * run.workers), float(len(seen) * replicas))
    return seen


def no_sync(run: Started) -> AbstractContextManager[None]:
    """Backwards inside accumulate on this rank."""
    return run.run.no_sync()


def weigh(run: Started, weight: float) -> None:
    """How much this rank's next backward counts."""
    run.run.weigh(weight)


def batches_of(run: Started, loader: Iterable[Batch]) -> Iterator[Batch]:
    """The loader's batches, as many as the longest rank has."""
    return run.run.batches(loader)


def shard(run: Started, loader: Iterable[Batch], **options: Any) -> Iterable[Batch]:
    """This rank's share of what every rank draws alike. options: drop_last."""
    return run.run.shard(loader, **options)


def count_bytes(run: Started) -> float:
    """Collective: bytes that a rank sent since the last call or the start, the mean over ranks."""
    report = run.run.report()
    before, run.told_bytes = run.told_bytes, report.steps * sum(line.measured.sent_bytes for line in report.lines)
    return run.told_bytes - before


def close(run: Started, **options: Any) -> None:
    """Collective: the run is over; the model is plain and has the newest weights. options: gather."""
    run.run.close(**options)


def block(run: Started) -> AbstractContextManager[Any]:
    """Closes the run at the end of a with-block; an exception ends it on this rank alone, at once."""
    return run.run


def report(run: Started) -> str:
    """Collective: forecast beside measured."""
    return str(run.run.report())


# The command line


def command(*arguments: Any, folder: Path) -> Ended:
    """`armillary *arguments` in `folder`, as a user types it."""
    (ended,) = forked_command(arguments, folder)
    return ended


def command_in_job(ranks: int, *arguments: Any, folder: Path) -> list[Ended]:
    """The same on every rank of a job that somebody else has launched, who ends it all with the first that fails."""
    return forked_command(arguments, folder, ranks)
