"""One of the two processes: runs every contender by turns and keeps how long its steps took.

A block is: steps that fill the pipeline, untimed; timed steps, from the end of the last filling one to the end of the
last timed one, on the slower process; then everything in flight is finished. Nobody waits between steps: what a block
times is the steady state, for flush schedules as for the cyclic one. `whole_seconds` is from a barrier before the first
step to a barrier after the last is finished, over all its steps: it charges a pipeline its filling and draining, too.
`cpu_seconds` is what the busier process used in a timed step, all threads.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from armillary.transport.transport import Transport
from benchmarks.cyclic_pipeline.contenders import SAMPLES, Contender, contenders
from benchmarks.measuring.record import machine

FILLING = 2  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transport = Transport()
    transport.open_lanes()
    makers = contenders(transport.place.rank, options.micro_batches, transport)
    running = {name: make() for name, make in makers.items()}
    blocks: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    for turn in range(options.rounds + 1):  # the first is not kept: it learns shapes and opens connections
        for name in _turned(list(running), turn):
            found = _block(running[name], options.steps if turn else 1, transport)
            if turn:
                blocks[name].append(found)
    conditions = {
        "machine": machine(),
        "micro-batches": options.micro_batches,
        "samples a micro-batch": SAMPLES,
        "timed steps a block": options.steps,
        "rounds": options.rounds,
    }
    differences = _differences(running, transport)
    if transport.place.rank == 0:
        whole = {"conditions": conditions, "blocks": blocks, "largest_weight_difference": differences}
        options.out.write_text(json.dumps(whole, indent=1) + "\n")
    transport.barrier()
    transport.close()


def _turned(names: list[str], turn: int) -> list[str]:
    """Another one begins every round, so that nobody always runs after the same one."""
    first = turn % len(names)
    return names[first:] + names[:first]


def _block(contender: Contender, steps: int, transport: Transport) -> dict[str, float]:
    transport.barrier()
    began = time.perf_counter()
    _repeat(contender.step, FILLING)
    filled, worked = time.perf_counter(), time.process_time()
    _repeat(contender.step, steps)
    steady, busy = (time.perf_counter() - filled) / steps, (time.process_time() - worked) / steps
    contender.settle()
    transport.barrier()
    whole = (time.perf_counter() - began) / (FILLING + steps)
    slowest = transport.agree_largest([steady, busy, whole])
    return dict(zip(("step_seconds", "cpu_seconds", "whole_seconds"), slowest))


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def _differences(running: dict[str, Contender], transport: Transport) -> dict[str, float]:
    """Of every contender's weights from those of the first, at the end; the flush ones did the same arithmetic."""
    first, *_ = running.values()
    mine = [max(float((a - b).abs().max()) for a, b in zip(one.weights(), first.weights())) for one in running.values()]
    return dict(zip(running, transport.agree_largest(mine)))


if __name__ == "__main__":
    main()
