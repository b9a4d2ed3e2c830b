"""What every rank runs: a script's first steps under DDP or under the one line, and a hundred later ones."""

import argparse
import contextlib
import io
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.start_up.scripts import SCRIPTS, stepped

SHORT, LATER = 3, 100  # steps: until a plan is there; those that a forecast is held against
LONG = 42 + LATER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", choices=SCRIPTS, required=True)
    parser.add_argument("--keep", type=Path, help="of the one line; DDP without")
    parser.add_argument("--steps", type=int, default=SHORT)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    script = SCRIPTS[options.script]
    torch.manual_seed(0)
    model = script.model()
    dist.init_process_group("gloo")
    optimizer, batches = script.optimizer(model), script.batches(dist.get_rank())
    run, trained, told = None, model, (io.StringIO(), io.StringIO())
    with contextlib.redirect_stdout(told[0]), contextlib.redirect_stderr(told[1]):
        if options.keep is None:
            trained = torch.nn.parallel.DistributedDataParallel(model)
        else:
            import armillary  # as a script of the user's would, and no sooner

            run = armillary.parallelize(model, optimizer, keep=options.keep)
        stepped(trained, optimizer, next(batches))
        first = alive_seconds()
        taken = list[float]()
        for batch in (next(batches) for _ in range(options.steps - 1)):
            began = time.perf_counter()
            stepped(trained, optimizer, batch)
            taken.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        found = {
            "first_step_seconds": first,
            "said": [line for line in told[0].getvalue().splitlines() if "a step is forecast" in line],
            "measured": told[1].getvalue().count("measuring links"),
            "plan": None if run is None else json.loads(run.plan.to_json()),
            "later_seconds": statistics.median(taken[-LATER:]) if options.steps >= LONG else None,
        }
        options.out.write_text(json.dumps(found) + "\n")
    dist.barrier()
    if run is not None:
        run.close()
    dist.destroy_process_group()


def alive_seconds() -> float:
    """Since the kernel started this process."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
