"""The held-out loss of a contender after so many steps: one process, coded as `reference/edges.py` says."""

from collections.abc import Sequence

import torch

import armillary
from armillary.reference.edges import Edges
from armillary.reference.versions import Reference
from armillary.schedules import codes_of, options_of
from benchmarks.edges.contenders import parts_of, planned
from benchmarks.edges.task import Sizes, held_out, loss, model_of, optimizer_of, steps_of

__all__ = ["trajectory"]


def trajectory(name: str, sizes: Sizes, stages: int, seed: int, looks: Sequence[int]) -> list[float]:
    """looks: the steps after which to look, the last of which ends the training."""
    model, steps = model_of(sizes, seed), steps_of(sizes, seed)
    link = armillary.Link(1e-4, 1e8)
    topology = armillary.Topology(1, stages, link, link, 1 << 33)
    seen = armillary.profile(model, next(steps_of(sizes, 0)), loss, workers=stages)
    plan = planned(name, sizes, seen, topology)
    options, parts = options_of(plan), parts_of(model, plan)
    reference = Reference(
        parts, optimizer_of(model), options.schedule(), lambda out, target: loss(lambda _: out, (out, target)), seed
    )
    reference.edges = Edges(codes_of(options.edges), seed, stages)
    found, judged = list[float](), held_out(sizes)
    for step in range(max(looks) + 1):
        if step in looks:
            with torch.no_grad():
                found.append(float(loss(model.eval(), judged)))
            model.train()
        if step < max(looks):
            reference.step(next(steps))
    return found
