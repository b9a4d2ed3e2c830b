"""What every rank runs: one revision trains alone, and the kernel tells the most memory that its steps took."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.measuring.memory import begin_watch, peak_bytes, pss_bytes, return_freed_memory
from benchmarks.measuring.record import machine
from benchmarks.revisions.cases import CASES
from benchmarks.revisions.job import alike, training
from benchmarks.revisions.source import Source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--older", type=Path, required=True)
    parser.add_argument("--newer", type=Path, required=True)
    parser.add_argument("--who", required=True, choices=("older", "newer"))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = CASES[options.case]
    sources = {"older": Source(options.older), "newer": Source(options.newer)}  # both, so that they begin alike
    plans = alike(case, sources, options.small)
    return_freed_memory()
    before = pss_bytes()
    step = training(case, sources[options.who], plans[options.who], options.small)
    return_freed_memory()
    watch = begin_watch()
    for _ in range(options.steps):
        step()
    mine = torch.tensor([peak_bytes(watch), pss_bytes(), before])
    every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    if dist.get_rank() == 0:
        ranks = [dict(zip(("peak", "between", "before"), one.tolist(), strict=True)) for one in every]
        options.out.write_text(json.dumps({"machine": machine(), "case": options.case, "ranks": ranks}) + "\n")
    dist.barrier()


if __name__ == "__main__":
    main()
