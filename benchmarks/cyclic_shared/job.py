"""What every rank runs: one mode, how long its steps took, how long its layers were at work, and what memory it took.

Layers wait instead of computing, as if every process had a processor of its own; weights, gradients, activations and
messages are real. Memory is the process's PSS at its peak over the timed steps, beside what it had before it built the
model. It is taken with micro-batches of all samples and of half of them: what grows with samples is activations, kept
or on their way. Data are made before and not counted.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from armillary.transport.transport import Transport
from benchmarks.cyclic_shared.modes import LAYERS, MODES, WIDTH, Mode, Sizes, make
from benchmarks.measuring.memory import begin_watch, peak_bytes, pss_bytes, return_freed_memory
from benchmarks.measuring.record import machine

WARM_STEPS = 3


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    transport = Transport(options.workers if options.mode == "replicas" else 1)
    transport.open_lanes()
    sizes = Sizes(options.workers, options.slack, options.samples, options.stage_seconds)
    few = _maker(options.mode, transport, replace(sizes, samples=sizes.samples // 2))
    many = _maker(options.mode, transport, sizes)
    _watched(few, 0, 1, transport)  # what libraries and connections take once
    runs = [_watched(few, 1, options.steps, transport), _watched(many, options.rounds, options.steps, transport)]
    everyones: list[list[dict[str, Any]]] = transport.share(runs)
    if transport.place.rank == 0:
        record = {
            "machine": machine(), "layers": LAYERS, "activation_bytes": LAYERS * options.samples * WIDTH * 4,
            "weight_bytes": LAYERS * (WIDTH + 1) * WIDTH * 4, "few": [one for one, _ in everyones],
            "many": [one for _, one in everyones],
        }  # fmt: skip
        options.out.write_text(json.dumps(record) + "\n")
    transport.barrier()
    transport.close()


def _maker(mode: str, transport: Transport, sizes: Sizes) -> Callable[[], Mode]:
    stream = torch.Generator().manual_seed(0)
    inputs, target = torch.randn(2, sizes.samples, WIDTH, generator=stream).unbind()
    return lambda: make(mode, transport, sizes, (inputs, target))


def _watched(build: Callable[[], Mode], rounds: int, steps: int, transport: Transport) -> dict[str, Any]:
    """Rounds follow one another without a pause; seconds are from the end of the last warm step on."""
    return_freed_memory()
    bare = pss_bytes()
    mode = build()
    for _ in range(WARM_STEPS):
        mode.step()
    level, before, marks = begin_watch(), mode.busy_seconds(), [time.perf_counter()]
    for _ in range(rounds):
        for _ in range(steps):
            mode.step()
        marks.append(time.perf_counter())
    busy = mode.busy_seconds() - before
    found = {
        "step_seconds": [(after - first) / steps for first, after in pairwise(marks)],
        "busy_seconds": busy / max(1, rounds * steps),
        "peak_bytes": peak_bytes(level) - bare,
    }
    mode.settle()
    transport.barrier()
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--slack", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--stage-seconds", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
