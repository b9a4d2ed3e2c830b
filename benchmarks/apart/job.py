"""One of two hosts: trains a perceptron of two parts by a pipeline, then apart, and keeps samples a second and bytes.

Apart, host 0 trains its part for all epochs and sends its outputs once; then host 1 trains the other. The clock runs
from the first sample to the end of the last step.
"""

import argparse
import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from armillary import local_losses
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import Stage
from armillary.stages.train_spec import TrainSpec, in_a_row
from armillary.transport.point_to_point import CountedChannel
from armillary.transport.transport import Transport

SAMPLES, EPOCHS, BATCH, WIDTH, CLASSES, MICRO_BATCHES = 2048, 4, 64, 256, 10, 2
CUT = 6
Batch = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport = Transport()
    transport.open_lanes()
    ways = {"one_f_one_b": _pipeline(transport), "apart": _apart(transport)}
    if transport.place.rank == 0:
        options.out.write_text(json.dumps({"ways": ways}) + "\n")
    transport.barrier()
    transport.close()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (256, *[WIDTH] * 5)
    hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def _data() -> list[Batch]:
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 256, generator=draw)
    return list(zip(x.split(BATCH), x[:, :CLASSES].argmax(1).split(BATCH), strict=True))


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _pipeline(transport: Transport) -> Mapping[str, float]:
    """One epoch is enough to know its rate; its bytes are those of all epochs."""
    rank, model = transport.place.rank, _model()
    part = (model[:CUT], model[CUT:])[rank]
    stages = [Stage(j, nn.Identity(), {}) for j in range(2)]
    stages[rank] = Stage(rank, part, {name: name for name, _ in part.named_parameters()})
    channel, schedule = CountedChannel(transport), one_f_one_b(2, MICRO_BATCHES)
    optimizer = torch.optim.Adam(part.parameters(), 1e-3)
    pipeline = Interpreter(
        stages, optimizer, TrainSpec(schedule, F.cross_entropy), in_a_row(schedule, rank, channel)
    )  # fmt: skip
    batches = _data()
    steps = [batches[first : first + MICRO_BATCHES] for first in range(0, len(batches), MICRO_BATCHES)]
    pipeline.step(steps[0])
    pipeline.settle()
    channel.take()
    transport.barrier()
    began = time.perf_counter()
    for step in steps:
        pipeline.step(step)
    pipeline.settle()
    seconds = transport.agree_largest([time.perf_counter() - began])[0]
    sent = sum(transport.share(sum(many for many, _ in channel.take().values())))
    return {"rate": SAMPLES / seconds, "bytes": EPOCHS * sent, "epochs": EPOCHS}


def _apart(transport: Transport) -> Mapping[str, float]:
    rank, batches = transport.place.rank, _data()
    parts = local_losses.apart(
        _model(), _loss, batches[0], at=[str(CUT)], classes=CLASSES, labels=lambda batch: batch[1]
    )
    transport.barrier()
    began, sent = time.perf_counter(), 0.0
    if rank == 0:
        _train(parts[0], batches)
        made = parts[0].hand_over(batches)
        values = made.values.contiguous()
        sent = float(values.nbytes)
        dist.send(values, 1)
        dist.send(torch.tensor(list(made.made_by.encode()), dtype=torch.uint8), 1)
    else:
        values, name = torch.empty(SAMPLES, WIDTH), torch.empty(64, dtype=torch.uint8)
        dist.recv(values, 0)
        dist.recv(name, 0)
        joined = tuple(torch.cat(column) for column in zip(*batches, strict=True))
        _train(parts[1], local_losses.HandOver(0, values, joined, BATCH, bytes(name.tolist()).decode()))
    seconds = transport.agree_largest([time.perf_counter() - began])[0]
    return {"rate": EPOCHS * SAMPLES / seconds, "bytes": sum(transport.share(sent)), "epochs": EPOCHS}


def _train(part: local_losses.ApartPart, source: list[Batch] | local_losses.HandOver) -> None:
    optimizer = torch.optim.Adam(part.parameters(), 1e-3)
    for given in part.batches(source, EPOCHS):
        optimizer.zero_grad()
        part.loss(given).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
