"""One of N processes that train the same model on one host, as a ring or under DDP; tells when its steps ran."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from armillary.schedules.cyclic import cyclic
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import chain, costs, cut
from armillary.stages.train_spec import TrainSpec, in_a_row
from armillary.transport.transport import Transport
from benchmarks.cyclic_memory.models import loss, shapes
from benchmarks.measuring.memory import return_freed_memory

FILLING, STEPS = 2, 4
BACKWARD = 2  # a backward is paced to as many times the forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("ring", "ddp"), required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--pace-seconds", type=float, required=True, help="of a link's forward; 0: as fast as it goes")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transport = Transport()
    transport.open_lanes()
    model = shapes()["ViT-B/16"].model()
    step, end = (_ring if options.mode == "ring" else _ddp)(model, options.samples, transport)
    if options.pace_seconds:
        _pace(model, options.pace_seconds)
    for _ in range(FILLING):
        step()
    return_freed_memory()
    began = time.monotonic()
    for _ in range(STEPS):
        step()
    ended = time.monotonic()
    end()
    spans = transport.share((began, ended))
    if transport.place.rank == 0:
        options.out.write_text(json.dumps({"spans": spans}))
    transport.barrier()
    transport.close()


def _pace(model: nn.Sequential, seconds: float) -> None:
    """Every link takes the same time forward, and BACKWARD times that backward: it computes, and waits for the rest.

    So workers that share the processors of one host keep time as workers with a device each would.
    """
    for link in model:
        until = [0.0, 0.0]

        def start(place: int, length: float, until: list[float] = until) -> None:
            until[place] = time.monotonic() + length

        def wait(place: int, until: list[float] = until) -> None:
            time.sleep(max(0.0, until[place] - time.monotonic()))

        link.register_forward_pre_hook(lambda *given, start=start: start(0, seconds))
        link.register_forward_hook(lambda *given, wait=wait: wait(0))
        link.register_full_backward_pre_hook(lambda *given, start=start: start(1, BACKWARD * seconds))
        link.register_full_backward_hook(lambda *given, wait=wait: wait(1))


def _ring(model: nn.Sequential, samples: int, transport: Transport) -> tuple[Callable[[], None], Callable[[], None]]:
    shape = shapes()["ViT-B/16"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    links, batch = chain(model), shape.batch(samples)
    schedule = cyclic(transport.place.workers, costs=costs(links, shape.batch(1)[0]))
    stages = cut(model, links, range(1, len(links)))
    seat = in_a_row(schedule, transport.place.rank, transport)
    run = Interpreter(stages, optimizer, TrainSpec(schedule, loss), seat)

    def step() -> None:
        run.step([batch])

    def drain() -> None:
        run.drain()

    return step, drain


def _ddp(model: nn.Sequential, samples: int, transport: Transport) -> tuple[Callable[[], None], Callable[[], None]]:
    parallel = DistributedDataParallel(model)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.01), shapes()["ViT-B/16"].batch(samples)

    def step() -> None:
        optimizer.zero_grad()
        loss(parallel(batch[0]), batch[1]).backward()
        optimizer.step()

    return step, lambda: None


if __name__ == "__main__":
    main()
