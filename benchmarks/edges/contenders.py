"""Who is compared: a pipeline 1F1B uncoded, by every codec that is worth a look, and torch's own 1F1B.

What a contender makes of a step's micro-batches is one function. All begin with the same weights and the same cut.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import armillary
from benchmarks.edges.task import Batch, Sizes, loss, model_of, optimizer_of

__all__ = ["CODED", "TORCH", "UNCODED", "Contender", "built", "parts_of", "planned", "wishes"]

UNCODED, TORCH = "uncoded", "torch 1F1B"
CODED = {  # there and back
    UNCODED: ("", ""),
    "fp16": ("lower_precision(dtype=float16)", "lower_precision(dtype=float16)"),
    "int8": ("quantize(bits=8)", "quantize(bits=8)"),
    "hadamard int4": ("hadamard(quantize(bits=4, tile=64))", "quantize(bits=8)"),  # a scale for each rotated tile
    "int4": ("quantize(bits=4)", "quantize(bits=8)"),
    "AQ-SGD int4": ("aq_sgd(quantize(bits=4))", "quantize(bits=8)"),
    "DCT": ("threshold(sparsity=0.9)", "same"),
    "top_k": ("top_k(keep=0.1)", "top_k(keep=0.1)"),
    "top_k, back only": ("", "top_k(keep=0.1)"),
}


class Contender(NamedTuple):
    """step(micro-batches): one step. close: at the end."""

    step: Callable[[Sequence[Batch]], object]
    close: Callable[[], object]


def wishes(name: str) -> dict[str, armillary.Choice]:
    named = {option: text for option, text in zip(("edge", "edge_back"), CODED[name], strict=True) if text}
    return {option: armillary.Choice.parse(text) for option, text in named.items()}


def planned(name: str, sizes: Sizes, profile: armillary.Profile, topology: armillary.Topology) -> armillary.Plan:
    """By a cut that is the same for all: into equal numbers of modules."""
    stages, modules = topology.workers, sizes.blocks + 2
    points = [str(modules * stage // stages) for stage in range(1, stages)]
    schedule = armillary.Choice("one_f_one_b", {"micro_batches": sizes.micro_batches, "points": points})
    return armillary.plan(profile, topology, schedule=schedule, **wishes(name))


def parts_of(model: nn.Sequential, plan: armillary.Plan) -> list[nn.Sequential]:
    """The model's stages."""
    begins = [int(stage.begins.split(".")[0]) for stage in plan.stages]
    return [model[begin:end] for begin, end in zip(begins, [*begins[1:], len(model)], strict=True)]


def built(name: str, sizes: Sizes, plan: armillary.Plan, topology: armillary.Topology, example: Batch) -> Contender:
    """
    Args:
        plan: the contender's; torch's pipeline is cut as it says.
    """
    model = model_of(sizes, seed=0)
    if name != TORCH:
        run = armillary.attach(plan, model, optimizer_of(model), loss=loss, example=example, topology=topology)
        return Contender(run.step, run.close)
    rank, parts = torch.distributed.get_rank(), parts_of(model, plan)
    stage = PipelineStage(parts[rank], rank, len(parts), torch.device("cpu"))
    schedule = Schedule1F1B(stage, sizes.micro_batches, loss_fn=lambda out, target: loss(lambda _: out, (out, target)))
    return Contender(partial(_torch_step, schedule, optimizer_of(parts[rank]), rank, len(parts)), lambda: None)


def _torch_step(
    schedule: Schedule1F1B, optimizer: torch.optim.Optimizer, rank: int, stages: int, micro_batches: Sequence[Batch]
) -> None:
    optimizer.zero_grad()
    given = [torch.cat([batch[0] for batch in micro_batches])] if rank == 0 else []
    named = {"target": torch.cat([batch[1] for batch in micro_batches])} if rank == stages - 1 else {}
    schedule.step(*given, **named)
    optimizer.step()
