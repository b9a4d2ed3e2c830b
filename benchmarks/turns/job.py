"""What every rank runs: the same request by gloo's collective and by ours in turns, by turns."""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from armillary.transport import pairwise
from armillary.transport.transport import Transport

Action = Callable[[], object]
SIZES = (1 << 12, 1 << 17, 1 << 19, 1 << 21)  # bytes of a rank's tensor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport = Transport()
    group, place = transport.groups["world", "cpu"]
    ours = pairwise.Pairwise()
    rows = []
    for size in SIZES:
        piece = size // 4 // place.workers
        tensor, answer = torch.zeros(piece * place.workers), torch.empty(piece * place.workers)
        even = (piece,) * place.workers
        requests = {
            "all-to-all": {
                "gloo": lambda: dist.all_to_all_single(answer, tensor, group=group),  # noqa: B023
                "turns": lambda: ours.all_to_all(tensor, even, even, group, place)[0](),  # noqa: B023
            },
            "all-reduce": {
                "gloo": lambda: dist.all_reduce(tensor, group=group),  # noqa: B023
                "turns": lambda: ours.all_reduce(tensor, group, place)[0](),  # noqa: B023
            },
        }
        for request, ways in requests.items():
            seconds = _alternating(transport, ways, options.rounds)
            rows.append({"request": request, "bytes": 4 * piece * place.workers, "seconds": seconds})
    if place.rank == 0:
        Path(options.out).write_text(json.dumps({"workers": place.workers, "rows": rows}, indent=1) + "\n")
    transport.barrier()
    sys.stdout.flush()
    os._exit(0)


def _alternating(transport: Transport, ways: Mapping[str, Action], rounds: int) -> dict[str, list[float]]:
    """Quartiles of the seconds from a barrier until all ranks have their answer."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, action in ways.items():
            transport.barrier()
            began = time.perf_counter()
            action()
            transport.barrier()
            if turn:  # the first warms up
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.quantiles(times, n=4) for name, times in taken.items()}


if __name__ == "__main__":
    main()
