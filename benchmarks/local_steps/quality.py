"""Accuracy after so many steps: four replicas in one process, joined by what their exchange means."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import armillary
from armillary.exchanges import build_dense
from armillary.reference.replicas import Replicas, SharedGroup
from benchmarks.local_steps.training import HOSTS, accuracy, adamw, batch_of, loss, made

__all__ = ["WAYS", "trained"]

WAYS = {
    "DDP": "",
    "H = 1": "local_steps(steps=1)",
    "H = 8": "local_steps(steps=8)",
    "H = 32": "local_steps(steps=32)",
    "H = 128": "local_steps(steps=128)",
    "PowerSGD": "low_rank(rank=4, start=10)",
}


def trained(way: str, split: str, seed: int, looks: Sequence[int], is_small: bool) -> Mapping[str, Any]:
    """looks: steps after which to look, the last of which ends the training."""
    model = made(is_small, seed).model
    groups = []
    if WAYS[way]:
        choice = armillary.Choice.parse(WAYS[way])
        names = tuple(name for name, _ in model.named_parameters())
        groups = [SharedGroup(names, build_dense(choice.name, **choice.options))]
    replicas, found = Replicas(model, adamw, HOSTS, groups), list[float]()
    for step in range(max(looks) + 1):
        if step in looks:
            found.append(accuracy(_mean_of(replicas), is_small))
        if step < max(looks):
            replicas.step([batch_of(is_small, split, seed, step, rank) for rank in range(HOSTS)], loss)
    return {"steps": list(looks), "accuracy": found}


def _mean_of(replicas: Replicas) -> torch.nn.Module:
    model = copy.deepcopy(replicas.models[0])
    with torch.no_grad():
        for name, value in replicas.consensus().items():
            model.get_parameter(name).copy_(value)
    return model
