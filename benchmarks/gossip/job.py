"""What every host runs: contenders that settle and are saved, or are loaded and timed by turns; or one trained live."""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import armillary
from armillary.session.workload import TrainBatches
from benchmarks.gossip.timed import CONTENDERS, LIVE, LIVE_FROM, LIVE_WAY, SETTLED, WHOLE, workload
from benchmarks.measuring.record import machine
from benchmarks.measuring.workloads import first_batches, start
from benchmarks.netlab import Counted, counted_bytes


class Trainer:
    """A contender at work over its own share of the data."""

    def __init__(self, plan: armillary.Plan, work: Any, skipped: int = 0) -> None:
        self.work = work
        self.model, self.optimizer = start(work)
        self.run = armillary.attach(plan, self.model, self.optimizer)
        feed = TrainBatches(work, (dist.get_rank(), dist.get_world_size()), 0)
        self.feed: Iterator[Any] = islice(feed, skipped, None)

    def steps(self, count: int) -> None:
        for batch in islice(self.feed, count):
            self.optimizer.zero_grad()
            self.work.loss(self.model, batch).backward()
            self.optimizer.step()


def main() -> None:
    asked = _options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work, found = workload(asked.small), dict[str, Any]()
    if asked.what == "settle":
        _settle(asked, work)
    elif asked.what == "time":
        found = {"turns": _timed(asked, work)}
    else:
        found = _live(asked, work)
    if dist.get_rank() == 0:
        asked.out.write_text(json.dumps({**found, "machine": machine()}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _settle(asked: argparse.Namespace, work: Any) -> None:
    few = first_batches(work, dist.get_world_size())
    decided = armillary.auto_plan(*start(work), few, work.loss)
    for name in asked.turns or (*CONTENDERS, LIVE):
        plan = armillary.plan(decided.profile, decided.topology, constraints={"*": CONTENDERS.get(name, LIVE_WAY)})
        if dist.get_rank() == 0:
            (asked.folder / f"{name}.json").write_text(plan.to_json())
        one = Trainer(plan, work)
        one.steps(LIVE_FROM if name == LIVE else asked.steps)
        one.run.save(asked.folder / name)
        one.run.close()


def _plan(asked: argparse.Namespace, name: str) -> armillary.Plan:
    return armillary.Plan.from_json((asked.folder / f"{name}.json").read_text())


def _timed(asked: argparse.Namespace, work: Any) -> list[dict[str, Any]]:
    running = {}
    for name in dict.fromkeys(asked.turns):
        running[name] = Trainer(_plan(asked, name), work, SETTLED)
        running[name].run.load(armillary.latest_checkpoint(asked.folder / name))
        running[name].steps(1)  # untimed: connections open
    steps = {name: 2 if name == WHOLE else asked.steps for name in running}  # all steps of D-PSGD are alike
    return [{"contender": name, **_turn(running[name], steps[name])} for name in asked.turns]


def _turn(one: Trainer, steps: int) -> dict[str, float]:
    dist.barrier()
    counted, begun = counted_bytes(), time.perf_counter()
    one.steps(steps)
    seconds = _largest(time.perf_counter() - begun)
    return {"step_seconds": seconds / steps, "sent_bytes": _sent(counted) / steps, "steps": steps}


def _largest(seconds: float) -> float:
    mine = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def _sent(before: Counted) -> float:
    """Payload, the mean of hosts."""
    mine = torch.tensor(float((counted_bytes() - before).sent_payload_bytes), dtype=torch.float64)
    dist.all_reduce(mine)
    return float(mine) / dist.get_world_size()


def _live(asked: argparse.Namespace, work: Any) -> dict[str, Any]:
    one = Trainer(_plan(asked, LIVE), work, LIVE_FROM)
    one.run.load(armillary.latest_checkpoint(asked.folder / LIVE))
    turn = _turn(one, asked.steps)
    return {"seconds": turn["step_seconds"] * asked.steps, "sent_bytes": turn["sent_bytes"], "steps": asked.steps}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("settle", "time", "live"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--turns", type=lambda text: text.split(","), default=[])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
