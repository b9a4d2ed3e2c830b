"""What every rank runs: the four ways, one after another, each trained from the same weights on the same samples.

Seconds are of the slowest rank, from the end of the first steps to the last; bytes are the mean over hosts, as the
kernel counted them. The loss is of samples that nobody trained on.
"""

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import armillary
from benchmarks.edges.task import BIG, SMALL, Batch, Sizes, held_out, loss, model_of, optimizer_of, steps_of
from benchmarks.measuring.record import machine
from benchmarks.netlab import counted_bytes

STAGES, FIRST_STEPS = 2, 2
BETWEEN_REPLICAS, ON_EDGES = "threshold(sparsity=0.99)", "threshold(sparsity=0.9)"
WAYS = {  # exchange, edge
    "none": ("", ""),
    "between replicas": (BETWEEN_REPLICAS, ""),
    "on edges": ("", ON_EDGES),
    "both": (BETWEEN_REPLICAS, ON_EDGES),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes = SMALL if asked.small else BIG
    replicas = dist.get_world_size() // STAGES
    whole = sizes._replace(micro_batches=sizes.micro_batches * replicas)
    steps = list(islice(steps_of(whole, asked.seed), asked.steps))
    model = model_of(sizes, asked.seed)
    decided = armillary.auto_plan(model, optimizer_of(model), steps[0], loss)
    first = dist.get_rank() // STAGES * sizes.micro_batches
    mine = [step[first : first + sizes.micro_batches] for step in steps]
    found = {way: _trained(way, asked.seed, sizes, decided, mine) for way in WAYS}
    if dist.get_rank() == 0:
        asked.out.write_text(json.dumps({"machine": machine(), "steps": asked.steps, "ways": found}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _trained(way: str, seed: int, sizes: Sizes, decided: Any, steps: list[list[Batch]]) -> dict[str, float]:
    exchange, edge = (armillary.Choice.parse(text) if text else None for text in WAYS[way])
    schedule = armillary.Choice("one_f_one_b", {"stages": STAGES, "micro_batches": sizes.micro_batches})
    plan = armillary.plan(
        decided.profile,
        decided.topology,
        schedule=schedule,
        constraints={} if exchange is None else {"*": exchange},
        **({} if edge is None else {"edge": edge, "edge_back": armillary.Choice("same")}),
    )
    model = model_of(sizes, seed)
    run = armillary.attach(plan, model, optimizer_of(model), loss=loss, example=steps[0][0], topology=decided.topology)
    for micro_batches in steps[:FIRST_STEPS]:
        run.step(micro_batches)
    dist.barrier()
    counted, begun = counted_bytes(), time.perf_counter()
    for micro_batches in steps[FIRST_STEPS:]:
        run.step(micro_batches)
    dist.barrier()
    taken, crossed = time.perf_counter() - begun, counted_bytes() - counted
    run.close()
    count = len(steps) - FIRST_STEPS
    table = torch.tensor([taken / count, crossed.sent_bytes / count], dtype=torch.float64)
    everyones = [torch.zeros_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, table)
    seconds, sent = torch.stack(everyones).unbind(1)
    with torch.no_grad():
        judged = float(loss(model.eval(), held_out(sizes)))
    return {"step_seconds": float(seconds.max()), "sent_bytes": float(sent.mean()), "loss": judged}


if __name__ == "__main__":
    main()
