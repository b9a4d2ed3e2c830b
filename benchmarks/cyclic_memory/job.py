"""The process that is watched: trains every contender and says when; the kernel keeps the high-water mark.

Every contender runs twice, with micro-batches of 1 and of several samples: what does not grow with the samples
(weights, their versions, gradients, optimizer state, the process itself) is in both and is subtracted by subtracting.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from armillary.schedules import Schedule
from benchmarks.cyclic_memory.contenders import NAMES, Contender, build
from benchmarks.cyclic_memory.ledger import Ledger
from benchmarks.cyclic_memory.models import Shape, loss, shapes
from benchmarks.measuring.memory import return_freed_memory

FILLING, STEPS = 1, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--workers", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape, rows = shapes()[options.model], []
    build("concurrent", shape, 1, 1).step()  # what libraries take once
    for workers in options.workers:
        for name in NAMES:
            runs = [_watched(name, shape, workers, samples) for samples in (1, options.samples)]
            rows.append({"name": name, "workers": workers, "runs": runs, **_counted(name, shape, workers, options)})
            whole = {"model": options.model, "samples": options.samples, "threads": 1, "rows": rows}
            options.out.write_text(json.dumps(whole, indent=1) + "\n")
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "runs"}), flush=True)


def _watched(name: str, shape: Shape, workers: int, samples: int) -> dict[str, Any]:
    """Peak over the steps, by the kernel; the bytes before there was a model; and the span of time for the curve."""
    return_freed_memory()
    before = _anonymous_bytes()
    contender = build(name, shape, workers, samples)
    for _ in range(FILLING):
        contender.step()
    began = time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the high-water mark, see proc(5)
    for _ in range(STEPS):
        contender.step()
    peak, ended = _high_water_bytes(), time.monotonic()
    contender.settle()
    return {"samples": samples, "began": began, "ended": ended, "before_bytes": before, "peak_bytes": peak}


def _anonymous_bytes() -> int:
    return _status_bytes("RssAnon")


def _high_water_bytes() -> int:
    """Anonymous memory at the mark of RSS; libraries' pages are all in by then and stay."""
    return _status_bytes("VmHWM") - _status_bytes("RssFile") - _status_bytes("RssShmem")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise RuntimeError(f"cyclic_memory: /proc/self/status has no {field}; this needs Linux")


def _counted(name: str, shape: Shape, workers: int, options: argparse.Namespace) -> dict[str, int]:
    """By the ledger: the most that was saved; and the forecast: stages held times the bytes each one saves."""
    found = {}
    contender = build(name, shape, workers, options.samples)
    ledger = _ledger(contender)
    with ledger.watching():
        for _ in range(FILLING + 1):
            contender.step()
        found["saved_bytes"] = ledger.peak_bytes
        contender.settle()
    if contender.schedule is not None and "recomputed" not in name:
        found["forecast_bytes"] = forecast(contender.schedule, stage_bytes(shape, options.samples))
    return found


def _ledger(contender: Contender) -> Ledger:
    """Weights are left out. At slack 0 a forward reads older ones only while there are no newer, so those it reads are
    always in the parameters' storage."""
    return Ledger(
        lambda: {p.untyped_storage().data_ptr() for stage in contender.stages for p in stage.module.parameters()}
    )


def stage_bytes(shape: Shape, samples: int) -> list[int]:
    """What each stage saves for one micro-batch, the last one with the loss."""
    contender = build("concurrent", shape, 1, samples)
    ledger, found = _ledger(contender), []
    value, target = shape.batch(samples)
    with ledger.watching():
        for stage in contender.stages:
            value = stage.module(value)
            if stage is contender.stages[-1]:
                value = loss(value, target)
            found.append(ledger.live_bytes - sum(found))
    return found


def forecast(schedule: Schedule, sizes: list[int]) -> int:
    """The most bytes held after any tick of a step in the steady state, by the schedule alone."""
    latest = max(action.end for row in schedule.ticks for action in row)
    ticks = range(latest, latest + schedule.period)
    return max(sum(sizes[stage] for _, _, stage in schedule.held_after(tick)) for tick in ticks)


if __name__ == "__main__":
    main()
