"""One of two processes: runs every pipeline by turns, and keeps seconds a step and bytes that were sent.

A step's two micro-batches are the same for all. A block is two steps that fill the pipeline, then timed ones; what
counts is the slower process.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

from armillary import local_losses
from armillary.schedules import Schedule
from armillary.schedules.cyclic import cyclic_pipeline
from armillary.schedules.local_losses import local_losses as local_table
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import Stage
from armillary.stages.train_spec import TrainSpec, in_a_row
from armillary.transport.point_to_point import CountedChannel
from armillary.transport.transport import Transport
from benchmarks.cyclic_pipeline.contenders import LEARNING_RATE, SAMPLES, STAGES, WIDTH, data, loss, of_torch, stage_of
from benchmarks.local_losses.run import CYCLIC, EXACT, OURS, TORCH

MICRO_BATCHES, FILLING = 2, 2


@dataclass(frozen=True)
class Contender:
    """A pipeline that trains. sent: bytes of this process's messages since it was last asked; negative: not counted."""

    step: Callable[[], Any]
    settle: Callable[[], Any]
    sent: Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport = Transport()
    transport.open_lanes()
    tables = {OURS: local_table, EXACT: one_f_one_b, CYCLIC: cyclic_pipeline}
    makers = {name: partial(_of_ours, table(STAGES, MICRO_BATCHES), transport) for name, table in tables.items()}
    running = {name: make() for name, make in {**makers, TORCH: partial(_of_torch, transport)}.items()}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    sent: dict[str, float] = {}
    for turn in range(options.rounds + 1):  # the first is not kept: it learns shapes and opens connections
        names = list(running)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found = _block(running[name], options.steps if turn else 1, transport)
            if turn:
                seconds[name].append(found)
            bytes_sent = [one for one in transport.share(running[name].sent()) if one >= 0]
            sent[name] = sum(bytes_sent) / ((options.steps if turn else 1) + FILLING) if bytes_sent else -1.0
    if transport.place.rank == 0:
        options.out.write_text(json.dumps({"seconds": seconds, "bytes": sent}) + "\n")
    transport.barrier()
    transport.close()


def _block(contender: Contender, steps: int, transport: Transport) -> float:
    transport.barrier()
    for _ in range(FILLING):
        contender.step()
    began = time.perf_counter()
    for _ in range(steps):
        contender.step()
    mine = (time.perf_counter() - began) / steps
    contender.settle()
    transport.barrier()
    return transport.agree_largest([mine])[0]


def _own_loss(stage: nn.Module, output: Tensor, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    assert isinstance(stage, local_losses.HeadedPart)
    return stage.own_loss(output, target, loss)


def _of_ours(schedule: Schedule, transport: Transport) -> Contender:
    rank, (inputs, targets) = transport.place.rank, data(MICRO_BATCHES)
    module: nn.Module = stage_of(rank)
    if rank in schedule.uncoupled:
        module = local_losses.HeadedPart(module, nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    stages = [Stage(j, nn.Identity(), {}) for j in range(STAGES)]
    stages[rank] = Stage(rank, module, {name: name for name, _ in module.named_parameters()})
    channel = CountedChannel(transport)
    spec = TrainSpec(schedule, loss, objectives=dict.fromkeys(schedule.uncoupled, _own_loss))
    pipeline = Interpreter(stages, optimizer, spec, in_a_row(schedule, rank, channel))
    step = partial(pipeline.step, list(zip(inputs.split(SAMPLES), targets.split(SAMPLES), strict=True)))
    return Contender(step, pipeline.settle, lambda: sum(many for many, _ in channel.take().values()))


def _of_torch(transport: Transport) -> Contender:
    torchs = of_torch(transport.place.rank, MICRO_BATCHES, Schedule1F1B)
    return Contender(torchs.step, torchs.settle, lambda: -1.0)


if __name__ == "__main__":
    main()
