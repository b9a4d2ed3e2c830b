"""One of the workers: runs a model of sixty small parameters alone, under DDP and under us, by turns.

`time.thread_time` counts what the training thread itself computes: hooks, queues and requests, not what it waits for
and not the threads that send. The difference to the same loop without any exchange is what a step pays for it. A last
turn under `cProfile`, on the same clock, says where in our files it goes.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import armillary
from armillary import Run, parallelize
from benchmarks.measuring.record import machine

LAYERS, WIDTH, SAMPLES, ROWS = 29, 64, 16, 1000
TABLES = ("first.weight", "second.weight")
Step = Callable[[], None]


class Small(nn.Module):
    """Two tables and 29 linear layers: 60 parameters, so small that a step is mostly Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)])

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.first(ids) + self.second(ids)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    modes = {"alone": _alone(), "DDP": _ddp(), "ours, all_reduce": _ours(**{"*": "all_reduce"}),
             "ours, owned_rows": _ours(**dict.fromkeys(TABLES, "owned_rows")), "ours, planned": _ours()}  # fmt: skip
    spent: dict[str, list[float]] = {name: [] for name in modes}
    for turn in range(options.rounds + 1):
        for name, step in modes.items():
            milliseconds = _turn(step, options.steps)
            if turn:
                spent[name].append(milliseconds)
    profiles = {name: _profile(step, options.steps) for name, step in modes.items() if name.startswith("ours")}
    everyones: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, spent)
    if dist.get_rank() == 0:
        conditions = {"machine": machine(), "workers": dist.get_world_size(), "parameters": 2 * LAYERS + 2,
                      "rounds": options.rounds, "steps a turn": options.steps}  # fmt: skip
        record = {"conditions": conditions, "thread_milliseconds_a_step_by_rank": everyones, "profiles": profiles}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _turn(step: Step, steps: int) -> float:
    """Milliseconds of the training thread a step, the median of the turn's steps."""
    dist.barrier()
    spent = []
    for _ in range(steps):
        before = time.thread_time()
        step()
        spent.append(time.thread_time() - before)
    return statistics.median(spent) * 1e3


def _profile(step: Step, steps: int) -> list[str]:
    """Our own functions by the time spent in themselves, a line each."""
    dist.barrier()
    watch = cProfile.Profile(time.thread_time)
    watch.runcall(lambda: [step() for _ in range(steps)])
    root = str(Path(armillary.__file__).parent)
    rows = [
        (own / steps * 1e3, calls / steps, f"{Path(file).relative_to(root)}:{line} {name}")
        for (file, line, name), (_, calls, own, _, _) in pstats.Stats(watch).stats.items()  # type: ignore[attr-defined]
        if file.startswith(root)
    ]
    whole = sum(own for own, _, _ in rows)
    top = sorted(rows, reverse=True)[:20]
    return [f"{whole:.2f} ms a step in all of our functions"] + [
        f"{own:.3f} ms, {calls:.1f} calls: {where}" for own, calls, where in top
    ]


def _model() -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small()


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def _loop(model: nn.Module, optimizer: Optimizer, run: Run | None = None) -> Step:
    stream = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        assert run is None or run.plan  # it lives as long as its step does
        optimizer.zero_grad()
        model(torch.randint(ROWS, (SAMPLES, 4), generator=stream)).backward()
        optimizer.step()

    return step


def _alone() -> Step:
    model = _model()
    return _loop(model, _sgd(model))


def _ddp() -> Step:
    model = _model()
    return _loop(DistributedDataParallel(model, gradient_as_bucket_view=True), _sgd(model))


def _ours(**constraints: str) -> Step:
    """Under the plan of this job, but for what is demanded of some parameters."""
    model = _model()
    optimizer = _sgd(model)
    batches = [(torch.randint(ROWS, (SAMPLES, 4)),) for _ in range(2 * dist.get_world_size())]
    run = parallelize(model, optimizer, batches, lambda m, batch: m(*batch), constraints=constraints)
    return _loop(model, optimizer, run)


if __name__ == "__main__":
    main()
