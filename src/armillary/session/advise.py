"""What each method would do for a model on machines: every method is asked, and none is known here by name.

Nothing is trained. The model is profiled, every plan is priced from that one profile and topology, and rooms beside the
step forecast as they would for themselves. A forecast that takes long waits until it is asked for.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from torch import nn
from torch.optim import Optimizer

from armillary.plans.advice import TARGETS, Situation
from armillary.plans.topology import Link, Topology
from armillary.profiler.probe import Loss
from armillary.session.advice_page import AdvicePage, bottleneck
from armillary.session.asked_methods import NO_LIMIT, PROFILED_WORKERS, Told, played, rows_of, silent, situation_of
from armillary.session.model_to_plan import ModelToPlan
from armillary.session.parallelize import unmoved
from armillary.session.validation import handed_in

__all__ = ["advise", "asked_of_all", "refuse_other_targets"]

WORKERS, GBIT, LATENCY_SECONDS = 8, 1.0, 1e-4  # of machines that nobody told of
MOST_COMBINATIONS = 5


def advise(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[Any],
    loss: Loss,
    *,
    topology: Topology | None = None,
    memory_bytes: int | None = None,
    target: str = "seconds",
    measure: bool = False,
    told: Told = silent,
) -> AdvicePage:
    """What each method would bring for this model on these machines: seconds a step, bytes sent, peak memory, exact or
    not, and the line to type. In this process, which trains nothing; `print` it, or `.save` its picture.

    Args:
        batches: each one rank's batch of one step; at most two for each of 8 ranks are drawn.
        loss: loss(model, batch) -> scalar, the mean over the batch.
        topology: the machines: measured (`measure`), read (`Topology.load`) or given by hand. None: 8 ranks, 1 Gbit/s.
        memory_bytes: that a rank may hold; None: what the topology says, or no limit.
        target: sort by "seconds", "memory", "bytes" or "latency" (of a trained model's forward).
        measure: make forecasts, too, that take more than 5 seconds each.
        told: hears what is being done.

    Raises:
        ValueError: no such target, no batch, or a model that cannot be profiled.
    """
    refuse_other_targets(target)
    is_assumed = topology is None
    link = Link(LATENCY_SECONDS, GBIT * 1e9 / 8)
    machines = topology or Topology(2, 1, link, link, NO_LIMIT).of(WORKERS)
    if memory_bytes is not None:
        machines = replace(machines, memory_bytes=memory_bytes)
    if why := handed_in(model, optimizer):
        raise ValueError(f"advise: {why}")
    with unmoved(batches):
        drawn = list(islice(batches, 2 * min(machines.workers, PROFILED_WORKERS)))
        subject = ModelToPlan(model, optimizer, loss, lambda workers: drawn)
        is_stream = iter(batches) is batches
        situation = situation_of(subject, machines, is_stream=is_stream, measures=measure)
        said = ["8 ranks at 1 Gbit/s, since no topology= was given"] if is_assumed else []
        return asked_of_all(situation, target, said, told)


def refuse_other_targets(target: str) -> None:
    """
    Raises:
        ValueError: there is no such target.
    """
    if target not in TARGETS:
        raise ValueError(f"advise: no target {target!r}; there are {', '.join(TARGETS)}")


def asked_of_all(situation: Situation, target: str, said: Iterable[str] = (), told: Told = silent) -> AdvicePage:
    """
    Args:
        said: what was assumed of the machines.
    """
    rows = rows_of(situation, told)
    rows.sort(key=lambda row: row.place(target))
    combined = {one.name: one for row in rows for one in row.advice.combinations}
    quickest = sorted(combined.values(), key=lambda one: one.forecast.seconds if one.forecast else math.inf)
    return AdvicePage(
        bottleneck(situation, played(situation)),
        situation.typed,
        situation.chosen.forecast,
        situation.topology,
        situation.facts.seconds,
        tuple(rows),
        tuple(quickest[:MOST_COMBINATIONS]),
        (*said, *_assumed(situation)),
        target,
    )


def _assumed(situation: Situation) -> list[str]:
    topology, found = situation.topology, []
    if topology.processor is None:
        found.append("index work and memory speed at round figures (armillary measure times them)")
    if topology.workers > situation.profile.workers:
        found.append(f"rows read by {situation.profile.workers} ranks were counted, those of more follow Heaps' law")
    return [*found, "what is not exact may cost accuracy (armillary twin tells)"]
