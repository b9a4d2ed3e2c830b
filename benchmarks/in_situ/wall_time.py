"""What a solver loses to a slow reader, when a first epoch is trained, and how a window learns at equal wall time.

The solver is the example's wake, the model its next-frame model.
"""

import math
import multiprocessing
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from armillary import feeds
from benchmarks.in_situ.stores import folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "in_situ"
sys.path.insert(0, str(EXAMPLE))  # the example's files are scripts

import train  # noqa: E402
import wake  # noqa: E402

FORK = multiprocessing.get_context("fork")
EPOCH, BATCH = 64, 8


def _slow_reader(store: str, seconds: float) -> None:
    with feeds.Stream(store, window=feeds.Latest(8), batch=1, patience=600) as stream:
        for _ in stream:
            time.sleep(seconds)


def _step_seconds(store: str, steps: int) -> list[float]:
    """Of a solver's steps, each with its put."""
    taken, flow = [], wake.flow()
    next(flow)
    with feeds.Writer(store, keep=4, full="drop_oldest") as writer:
        for step in range(steps):
            began = time.perf_counter()
            writer.put(step, {"u": next(flow).astype(np.float32)})
            taken.append(time.perf_counter() - began)
    return taken[1:]  # the first makes the slots


def slow_reader(steps: int, rounds: int) -> dict[str, Any]:
    """The median step beside a reader that takes ten times as long, over that without a reader; rounds by turns."""
    alone: list[float] = []
    beside: list[float] = []
    with folder() as home:
        for turn in range(rounds):
            alone += _step_seconds(f"{home}/alone{turn}", steps)
            pause = 10 * statistics.median(alone)
            reader = FORK.Process(target=_slow_reader, args=(f"{home}/beside{turn}", pause))
            reader.start()
            beside += _step_seconds(f"{home}/beside{turn}", steps)
            reader.kill()
            reader.join()
    return {"alone": statistics.quantiles(alone, n=4), "beside": statistics.quantiles(beside, n=4)}


def _solver(store: str, steps: int) -> None:
    torch.set_num_threads(1)
    written = _written_bytes()
    with feeds.Writer(store, keep=EPOCH) as writer:
        for step, velocity in zip(range(steps), wake.flow(), strict=False):
            writer.put(step, _pair(velocity))
            if writer.stop_asked():
                break
    Path(f"{store}.written").write_text(str(_written_bytes() - written))


def _pair(velocity: np.ndarray) -> dict[str, np.ndarray]:
    now = (velocity / wake.SPEED).astype(np.float32)
    return {"now": now, "next": now}  # as large as a pair; what is learned does not count here


def _written_bytes() -> int:
    """What this process had the kernel write to disks."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["write_bytes"])


def _learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    optimizer.zero_grad()
    (model(batch["now"]) - batch["next"]).square().mean().backward()
    optimizer.step()


def first_epoch(steps: int, home: str) -> dict[str, Any]:
    """Seconds from the solver's start until 64 snapshots are trained on: while it runs, and after it has written all.

    Args:
        home: a folder on a disk, for what is written first.
    """
    torch.manual_seed(0)
    model = train.NextFrame()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with folder() as memory:
        began, own = time.perf_counter(), _written_bytes()
        solver = FORK.Process(target=_solver, args=(f"{memory}/flow", steps))
        solver.start()
        trained = 0
        with feeds.Stream(f"{memory}/flow", window=feeds.AllOnce(), batch=BATCH) as stream:
            for batch in stream:
                _learn(model, optimizer, batch)
                trained += BATCH
                if trained == EPOCH:
                    in_situ = time.perf_counter() - began
                    stream.ask_to_stop()
        solver.join()
        on_disk = _written_bytes() - own + int(Path(f"{memory}/flow.written").read_text())
    began, written = time.perf_counter(), Path(home)
    for step, velocity in zip(range(steps), wake.flow(), strict=False):
        np.savez(written / f"{step}.npz", **_pair(velocity))
    for first in range(0, EPOCH, BATCH):
        rows = [np.load(written / f"{step}.npz") for step in range(first, first + BATCH)]
        _learn(model, optimizer, {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]})
    after = time.perf_counter() - began
    return {"in situ": in_situ, "written first": after, "bytes on disk": on_disk}


def _changing(snapshot: int) -> float:
    """An inflow that falls to 0.4 and rises again within 240 snapshots."""
    return 0.7 + 0.3 * math.cos(2 * math.pi * snapshot / 240)


INFLOWS = {"steady": wake.steady, "changing": _changing}


@cache
def held_out(inflow: str, steps: int) -> dict[str, torch.Tensor]:
    """Pairs of the whole run, one in ten; the solver gives these to nobody."""
    frames = [
        (one / wake.SPEED).astype(np.float32) for _, one in zip(range(steps), wake.flow(INFLOWS[inflow]), strict=False)
    ]
    at = range(9, steps - 1, 10)
    return {
        "now": torch.from_numpy(np.stack([frames[i] for i in at])),
        "next": torch.from_numpy(np.stack([frames[i + 1] for i in at])),
    }


def _wake_without_held_out(inflow: str, store: str, steps: int) -> None:
    torch.set_num_threads(1)
    before = None
    with feeds.Writer(store, keep=16, full="drop_oldest") as writer:
        for step, velocity in zip(range(steps), wake.flow(INFLOWS[inflow]), strict=False):
            now = (velocity / wake.SPEED).astype(np.float32)
            if before is not None and (step - 1) % 10 != 9:
                writer.put(step, {"now": before, "next": now})
            before = now


def error(inflow: str, window: str, seed: int, steps: int, seconds: float) -> dict[str, Any]:
    """Error on the held-out frames, 1 being a model that says nothing changes, when so many seconds have gone.

    Args:
        steps: of the solver that frames are held out from. While it feeds training it goes on until time is over.
    """
    held = held_out(inflow, steps)
    torch.manual_seed(seed)
    model = train.NextFrame()
    optimizer, batches = torch.optim.Adam(model.parameters(), lr=2e-3), 0
    kind = {"reservoir": feeds.Reservoir(4096), "latest": feeds.Latest(16)}[window]
    with folder() as home:
        until = time.monotonic() + seconds
        solver = FORK.Process(target=_wake_without_held_out, args=(inflow, f"{home}/flow", 1_000_000))
        solver.start()
        newest = 0
        with feeds.Stream(f"{home}/flow", window=kind, batch=4, fresh=0, seed=seed) as stream:
            for batch in stream:
                optimizer.zero_grad()
                train.loss_of(model, batch).backward()
                optimizer.step()
                batches += 1
                newest = max(newest, *(id.step for id in stream.ids))
                if time.monotonic() > until:
                    break
        solver.kill()
        solver.join()
    with torch.no_grad():
        found = float(train.loss_of(model, held))
    return {"error": found, "batches": batches, "newest step": newest}
