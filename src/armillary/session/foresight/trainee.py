"""One of two models that are trained side by side: what a step does to it, and what evaluation would show of it.

Under a schedule that owns the loop it is trained as that schedule's truth is. There coded edges are what their codecs
mean inside one graph, and nothing is sent.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.facts.plan import Plan
from armillary.reference.replicas import Replicas
from armillary.schedules.registry import options_of
from armillary.session.cut_model import cut_model
from armillary.session.edges_at_eval import coded_leaves, edges_at_eval
from armillary.session.feed import Feed
from armillary.session.schedule_truth import ScheduleTruth
from armillary.session.truths import SeededBatch, seeded_loss
from armillary.session.workload import Workload

__all__ = ["Trainee", "of_replicas", "under_schedule"]


class Trainee(NamedTuple):
    """step: one training step, on its batches in their order. shown: gives a model to evaluate, as it is by now.
    complaint: why the training may not say what was asked; empty if it does."""

    step: Callable[[Sequence[SeededBatch]], object]
    shown: Callable[[], AbstractContextManager[nn.Module]]
    complaint: Callable[[], str] = str


def of_replicas(workload: Workload, replicas: Replicas) -> Trainee:
    """Where workers' weights differ, their mean is shown."""

    def loss(model: nn.Module, batch: SeededBatch) -> Tensor:
        return seeded_loss(workload, model, batch)

    @contextmanager
    def shown() -> Iterator[nn.Module]:
        model = replicas.models[0]
        if any(other is not model for other in replicas.models):
            model = copy.deepcopy(model)
            with torch.no_grad():
                for name, value in replicas.consensus().items():
                    model.get_parameter(name).copy_(value)
                for name, value in replicas.buffers().items():
                    model.get_buffer(name).copy_(value)
        yield model

    return Trainee(lambda batches: replicas.step(batches, loss), shown)


def under_schedule(
    workload: Workload, plan: Plan, model: nn.Module, optimizer: Callable[[nn.Module], Optimizer], seed: int
) -> Trainee:
    """
    Args:
        model: with the values that training begins with; it is copied.

    Raises:
        ValueError: the model or the loss cannot be cut as the plan says.
    """
    mine, options = copy.deepcopy(model), options_of(plan)
    example = next(Feed(workload, (0, options.total(plan.workers)), seed))
    cut = cut_model(workload.loss, mine, example, options)
    coded = coded_leaves(mine, plan, cut.input_of(example)) if options.method.is_cut else ()
    truth = ScheduleTruth(plan, mine, optimizer(mine), cut, seed)
    steps = 0

    def step(batches: Sequence[SeededBatch]) -> None:
        nonlocal steps
        truth.step([batch for _, batch in batches])
        steps += 1

    @contextmanager
    def shown() -> Iterator[nn.Module]:
        judged = copy.deepcopy(mine)
        with torch.no_grad():
            for name, buffer in next(iter(truth.own_buffers()), {}).items():
                judged.get_buffer(name).copy_(buffer)
        with edges_at_eval(judged, plan, steps, coded):
            yield judged

    def complaint() -> str:
        crossed = truth.edges.samples
        if not crossed["whole"] or crossed["change"]:
            return ""
        return (
            f"none of {crossed['whole']} samples came a second time to an edge that remembers them, so all crossed "
            "whole, and the forecast has their changes; train for more than an epoch, on samples that stay as they are"
        )

    return Trainee(step, shown, complaint)
