"""What every rank runs: training alone, ours, and ours with parts of the exchange left out, all alive, by turns."""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import armillary
from benchmarks.breakdown.stand_in import carry_only
from benchmarks.measuring.model import Sizes
from benchmarks.peers import cases, planning
from benchmarks.peers.case import Case, Step, plain_loop
from benchmarks.peers.contenders import alone

LEFT_OUT = ("nothing", "rounds", "messages")  # what is carried, see `stand_in.py`
OWNED = {"*": armillary.Choice("owned_rows")}
WARM_STEPS = 10  # prefetch has learned by then
SMALL = Sizes(vocabulary=20_000, features=64, hidden=8, projection=4, sentences=2, words=4, negatives=1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = SMALL if options.small else Sizes()
    if dist.get_rank() == 0:
        cases.write_start(sizes, options.folder)
    dist.barrier()
    steps = _all_of_them(cases.lm(sizes, dist.get_world_size(), options.mbit, options.folder))
    found: list[dict[str, float | str]] = []
    order = random.Random(7)  # the same on all ranks
    for _ in range(options.rounds):
        names = list(steps)
        order.shuffle(names)
        found += [{"mode": name} | _turn(steps[name], options.steps) for name in names]
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps({"workers": dist.get_world_size(), "turns": found}, indent=1) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in the other benchmarks: groups of several runs are not taken down one by one


def _all_of_them(case: Case) -> dict[str, Step]:
    """By mode; those with something left out first train for real.

    Raises:
        ValueError: no table prefetches, so the modes would be other than their names.
    """
    steps: dict[str, Step] = {"alone": _warm(alone.train_sparse(case))}
    for carried in (*LEFT_OUT, "everything"):
        steps[carried] = _warm(_ours(case))
        plan = planning.OPEN[-1].plan
        if not plan.looks_ahead:
            exchanges = {group.name: str(group.exchange) for group in plan.groups}
            raise ValueError(
                f"breakdown: no table of the plan prefetches: {exchanges}; take slower links or more ranks"
            )
        if carried != "everything":
            dist.barrier()
            carry_only(planning.OPEN[-1]._transport, carried)
            _warm(steps[carried])
    return steps


def _ours(case: Case) -> Step:
    """Every worker owns rows of either table: what is made up in another's place must mean a row here."""
    model = case.model()
    optimizer = case.optimizer(model.parameters())
    run = planning.parallelize(model, optimizer, case.few(), case.loss, prefetch=True, constraints=OWNED)
    return plain_loop(case, model, optimizer, run.batches(case.batches()))


def _warm(step: Step) -> Step:
    for _ in range(WARM_STEPS):
        step()
    return step


def _turn(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Milliseconds a step: from a barrier to a barrier, of processor (mean over ranks, all threads), and as the kernel
    counts what no process is charged with: idle, and softirq (both over all processors)."""
    step()
    dist.barrier()
    kernel, spent, began = _kernel(), time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    spent = time.process_time() - spent
    dist.barrier()
    wall = time.perf_counter() - began
    idle, softirq = (after - before for before, after in zip(kernel, _kernel(), strict=True))
    mean = torch.tensor([spent], dtype=torch.float64)
    dist.all_reduce(mean)
    each = {"wall": wall, "processor": float(mean) / dist.get_world_size(), "idle": idle, "softirq": softirq}
    return {name: seconds / steps * 1e3 for name, seconds in each.items()}


def _kernel() -> tuple[float, float]:
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    seconds = [count / os.sysconf("SC_CLK_TCK") for count in ticks]
    return seconds[3] + seconds[4], seconds[6]


if __name__ == "__main__":
    main()
