"""What every rank runs: one model's first two steps under the one line, and steps of it under DDP, by turns.

The tables' `sparse` is switched from contender to contender, so that one model serves all. Under the one line the plan
is asked to keep the tables whole: what it moves to after the two steps is not timed, and is quickly undone.
"""

import argparse
import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import armillary
from benchmarks.measuring.model import batches, seeded_model
from benchmarks.measuring.record import machine
from benchmarks.revisions.cases import SMALL_TABLES, TABLES

Batch = tuple[Tensor, Tensor]
STEADY = 3  # steps of DDP after its first two


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = SMALL_TABLES if options.small else TABLES
    model, data = seeded_model(sizes, sparse=True), batches(sizes, dist.get_rank())
    turns: list[Callable[[], dict[str, float]]] = [
        lambda: _ddp(model, data),
        lambda: _watched(model, data, is_sparse=True),
        lambda: _watched(model, data, is_sparse=False),
    ]
    rounds = []
    for number in range(options.rounds + 1):
        first = number % len(turns)
        found: dict[str, float] = {}
        for turn in turns[first:] + turns[:first]:
            found |= turn()
        if number:  # the first warms memory and connections up
            rounds.append({name: found[name] for name in sorted(found)})
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps({"machine": machine(), "rounds": rounds}, indent=1) + "\n")
    dist.barrier()


def _ddp(model: nn.Module, data: Iterator[Batch]) -> dict[str, float]:
    _tables_are(model, is_sparse=True)
    wrapped = DistributedDataParallel(model, init_sync=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        _backward(wrapped, optimizer, next(data))
        optimizer.step()

    return {
        "DDP sparse, first two": _slowest(lambda: (step(), step())) / 2,
        "DDP sparse": _slowest(lambda: [step() for _ in range(STEADY)]) / STEADY,
    }


def _watched(model: nn.Module, data: Iterator[Batch], is_sparse: bool) -> dict[str, float]:
    _tables_are(model, is_sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with contextlib.redirect_stdout(io.StringIO()):  # the plan
        run = armillary.parallelize(model, optimizer, constraints={"*": "all_reduce"})
        backward = _slowest(lambda: _backward(model, optimizer, next(data)))
        stepping = _slowest(optimizer.step)
        again = _slowest(lambda: _backward(model, optimizer, next(data)))
        move = _slowest(optimizer.step)
        run.close()
    name = "watched, sparse=True" if is_sparse else "watched"
    return {name: (backward + again) / 2 + stepping, f"{name}: move": move}


def _backward(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    model(*batch).backward()


def _tables_are(model: nn.Module, is_sparse: bool) -> None:
    model.zero_grad(set_to_none=True)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = is_sparse


def _slowest(call: Callable[[], object]) -> float:
    """Seconds, on the slowest rank, which all begin together."""
    dist.barrier()
    began = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


if __name__ == "__main__":
    main()
