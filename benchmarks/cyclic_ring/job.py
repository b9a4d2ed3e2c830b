"""What every rank runs: all modes by turns, how long their steps took, and what crossed the links meanwhile.

A turn is: warm steps, untimed; timed steps, from the end of the last warm one to the end of the last timed one, on the
slowest rank; then everything on its way is finished. Nobody waits between steps, so a turn times the steady state.
`whole_seconds` is from a barrier before the first step to a barrier after the last is finished, over all steps.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from armillary.transport.transport import Transport
from benchmarks.cyclic_ring.modes import Mode, Sizes, modes
from benchmarks.cyclic_ring.traffic import Watch
from benchmarks.measuring.record import machine
from benchmarks.netlab import counted_bytes

WARM_STEPS = 3


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    transport = Transport()
    transport.open_lanes()
    sizes = Sizes(options.batch, options.stages, options.waiting_seconds)
    makers = modes(transport, sizes)
    running = {name: makers[name]() for name in options.modes.split(",")}
    turns: list[dict[str, Any]] = []
    for round_number in range(-1, options.rounds):  # the first is not kept: it learns shapes and opens connections
        names = list(running)
        first = round_number % len(names)  # another one begins every round
        for name in names[first:] + names[:first]:
            turn = _turn(running[name], options.steps if round_number >= 0 else 1)
            if round_number >= 0:
                turns.append({"mode": name, "round": round_number, **turn})
    conditions = {
        "machine": machine(), "workers": transport.place.workers, "Mbit/s": options.mbit, "batch": sizes.batch,
        "seconds a step that layers wait instead of computing": sizes.waiting_seconds,
        "stages of the ring": sizes.stages, "rounds": options.rounds, "timed steps a turn": options.steps,
        "warm steps": WARM_STEPS,
    }  # fmt: skip
    if transport.place.rank == 0:
        options.out.write_text(json.dumps({"conditions": conditions, "turns": turns}) + "\n")
    transport.barrier()
    transport.close()


def _turn(mode: Mode, steps: int) -> dict[str, Any]:
    """The same on every rank."""
    dist.barrier()
    whole_begun = time.perf_counter()
    with Watch() as watch:
        for _ in range(WARM_STEPS):
            mode.step()
        counted, cpu, begun = counted_bytes(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            loss = mode.step()
        ended = time.perf_counter()
        cpu, crossed = time.process_time() - cpu, counted_bytes() - counted
    mode.settle()
    dist.barrier()
    mine = {
        "step_seconds": (ended - begun) / steps,
        "whole_seconds": (time.perf_counter() - whole_begun) / (WARM_STEPS + steps),
        "cpu_seconds": cpu / steps,
        "sent_bytes": crossed.sent_bytes / steps,
        "bins": watch.bins(begun, ended),
        "loss": float(loss),
    }
    everyones: list[dict[str, Any]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {
        "step_seconds": max(one["step_seconds"] for one in everyones),
        "whole_seconds": max(one["whole_seconds"] for one in everyones),
        "cpu_seconds": sum(one["cpu_seconds"] for one in everyones) / len(everyones),
        "sent_bytes": [one["sent_bytes"] for one in everyones],
        "bins": [one["bins"] for one in everyones],
        "loss": mine["loss"] if dist.get_rank() == 0 else everyones[0]["loss"],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", required=True)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--waiting-seconds", type=float, required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
