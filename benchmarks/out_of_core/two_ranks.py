"""One cell, under torchrun with two ranks: Adam's state in the tier beside DDP with torch's checkpoint on every block.

Ours gets the checkpoint's peak as its budget. Each way has a model of its own, and all take turns. Bytes are those that
the kernel carried between the process and its disk.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from armillary import residency
from armillary.models.preserved_state import LiveBytes
from benchmarks.measuring.record import machine
from benchmarks.out_of_core.job import loss
from benchmarks.out_of_core.models import MODELS
from benchmarks.out_of_core.ways import checkpointed

SLOW = 150e6  # bytes a second each way
Around = Callable[[nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]


class Trained:
    """A replica that trains one way. peak_bytes: of all its tensors in a step, the most of both ranks."""

    def __init__(self, around: Around, batch: Tensor, stack: ExitStack) -> None:
        torch.manual_seed(0)
        live = LiveBytes()
        with live:
            model = MODELS["transformer"].make()
            self.optimizer = torch.optim.Adam(model.parameters())
            self.batch = batch
            self.wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.held = stack.enter_context(around(model, self.optimizer))  # it takes times, and counting is slow
        with live:
            for _ in range(2):  # the state is made, and the buckets made anew
                self.step()
            live.mark()
            self.step()
        self.peak_bytes = int(most_of_ranks(live.most_bytes))

    def step(self) -> float:
        """Returns its loss."""
        self.optimizer.zero_grad()
        value = loss(self.wrapped, self.batch)
        value.backward()
        self.optimizer.step()
        return value.item()


def most_of_ranks(figure: float) -> float:
    there = torch.tensor(figure, dtype=torch.float64)
    dist.all_reduce(there, dist.ReduceOp.MAX)
    return there.item()


def disk_bytes() -> int:
    """Both ways."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("read_bytes", "write_bytes")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tier", default=".")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    subject = MODELS["transformer"]
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(subject.small_shape if options.small else subject.shape)
    with ExitStack() as stack:
        ways = {
            "DDP": Trained(lambda model, optimizer: nullcontext(), batch, stack),
            "DDP, torch checkpoint": Trained(lambda model, optimizer: checkpointed(model), batch, stack),
        }
        budget = ways["DDP, torch checkpoint"].peak_bytes

        def held(rate: float | None) -> Around:
            return lambda model, optimizer: residency.hold(
                model,
                [batch],
                loss,
                memory_bytes=budget,
                tier=options.tier,
                optimizer=optimizer,
                tier_bytes_per_second=rate,
            )

        ways["state in the tier, the disk as it is"] = Trained(held(None), batch, stack)
        ways["state in the tier, 150 MB/s"] = Trained(held(SLOW), batch, stack)
        found: dict[str, dict[str, Any]] = {
            way: {"seconds": [], "bytes": 0, "peak": one.peak_bytes} for way, one in ways.items()
        }
        names = list(ways)
        for turn in range(options.rounds):
            for way in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                before, began = disk_bytes(), time.perf_counter()
                found[way]["loss"] = ways[way].step()
                dist.barrier()
                found[way]["seconds"].append(time.perf_counter() - began)
                found[way]["bytes"] = disk_bytes() - before
        for way, one in ways.items():
            if isinstance(one.held, residency.Held):
                found[way]["residencies"] = one.held.plan.residencies
                found[way]["forecast_seconds"] = one.held.plan.played.seconds
    if dist.get_rank() == 0:
        print(json.dumps({"ways": found, "budget": budget, "machine": machine()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
