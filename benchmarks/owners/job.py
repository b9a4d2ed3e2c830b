"""What every rank runs: plans by the search, by price, for all owners and for one; forecasts them, carries them out by
turns. Rank 0 writes what came of it."""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import armillary
from benchmarks.measuring.record import machine

ROWS, WIDTH, READ = 100_000, 64, 4_000  # rows of the table, its columns, words in a batch
TABLE = "0.weight"
WARM_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", choices=("skewed", "even"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = ROWS // 50 if options.small else ROWS
    data = [words_of(options.draw, rows, dist.get_rank(), step) for step in range(options.steps)]
    made, search, forecasts = _planned(rows, data)
    blocks: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(options.rounds):
        names = list(made)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            blocks[name].append(_block(made[name], rows, data))
    if dist.get_rank() == 0:
        plans = {
            name: {
                "exchange": str(plan.group_of(TABLE).exchange), "forecast": forecasts[name], "blocks": blocks[name],
            }
            for name, plan in made.items()
        }  # fmt: skip
        options.out.write_text(json.dumps({"machine": machine(), "search": search, "plans": plans}, indent=1) + "\n")
    dist.barrier()


def words_of(draw: str, rows: int, rank: int, step: int) -> Tensor:
    """(sentences, 20) ids of rows; by Zipf's law with exponent 1, or each as likely as any other."""
    stream = torch.Generator().manual_seed(1000 * step + rank)
    shares = torch.rand(READ // 20, 20, generator=stream)
    ids = (rows**shares if draw == "skewed" else rows * shares).long()
    return ids.clamp(max=rows - 1)


def _model(rows: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.EmbeddingBag(rows, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def _loss(model: nn.Module, words: Tensor) -> Tensor:
    return model(words).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _planned(rows: int, data: list[Tensor]) -> tuple[Mapping[str, armillary.Plan], str, Mapping[str, float]]:
    """Plans by name, the same on every rank; what the search says of itself; seconds that each is forecast to take."""
    model = _model(rows)
    optimizer = _sgd(model)
    decided = armillary.auto_plan(model, optimizer, data, _loss, rule="parallax")
    asked = {
        "by price": {},
        "all owners": {TABLE: armillary.Choice("owned_rows")},
        "one owner": {TABLE: armillary.Choice("owned_rows", {"owners": 1})},
    }
    held = armillary.assumptions_of(optimizer)
    made = {"searched": decided.plan} | {
        name: armillary.plan(decided.profile, decided.topology, assumptions=held, constraints=wishes)
        for name, wishes in asked.items()
    }
    forecasts = {
        name: armillary.simulate(plan, decided.profile, decided.topology).step_seconds for name, plan in made.items()
    }
    (search,) = (note for note in decided.plan.notes if "searched over" in note)
    return made, search, forecasts


def _block(plan: armillary.Plan, rows: int, data: list[Tensor]) -> float:
    """Seconds of a step, from a barrier to a barrier."""
    model = _model(rows)
    with armillary.attach(plan, model, _sgd(model), loss=_loss) as run:
        for words in data[:WARM_STEPS]:
            run.step([words])
        dist.barrier()
        began = time.perf_counter()
        for words in data:
            run.step([words])
        dist.barrier()
        return (time.perf_counter() - began) / len(data)


if __name__ == "__main__":
    main()
