"""A rank of a job on 2 hosts with 2 ranks each: what crosses a link, modes measured by turns; rank 0 prints JSON."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from benchmarks.measuring.measure import Rounds, all_alive, interleave, one_at_a_time
from benchmarks.netlab import counted_bytes

TENSOR_BYTES = 4_000_000
MEBIBYTE = 2**20


def sent_by_hosts(members: Sequence[int]) -> list[int]:
    """Bytes each host sent during one all-reduce by `members`; all ranks call."""
    group = dist.new_group(list(members))
    tensor = torch.ones(TENSOR_BYTES // 4)
    dist.barrier()
    before = counted_bytes()
    if dist.get_rank() in members:
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(len(members)).all()
    dist.barrier()
    sent = torch.tensor([(counted_bytes() - before).sent_bytes])
    everyone = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, sent)
    by_host: list[int] = torch.cat(everyone)[::2].tolist()
    return by_host


def holding(held: int, for_a_moment: int) -> Callable[[], float]:
    """A mode that keeps some MiB and needs more within a step."""
    kept = torch.ones(held * MEBIBYTE // 4)

    def step() -> float:
        torch.ones(for_a_moment * MEBIBYTE // 4)
        return float(kept[0])

    return step


def sending() -> Callable[[], float]:
    """A mode in which host 0 sends `TENSOR_BYTES` to host 1 at each step, and host 1 nothing."""
    group = dist.new_group([0, 2])
    tensor = torch.ones(TENSOR_BYTES // 4)

    def step() -> float:
        if dist.get_rank() in (0, 2):
            dist.broadcast(tensor, src=0, group=group)
        return float(tensor[0])

    return step


dist.init_process_group("gloo")
modes = {"holding": partial(holding, 40, 36), "sending": sending}
two_rounds, one_round = (Rounds(rounds, warm_steps=1, timed_steps=3) for rounds in (2, 1))
found = {
    "one host": sent_by_hosts([0, 1]),
    "one rank of each host": sent_by_hosts([0, 2]),
    "alive": [asdict(block) for block in interleave(modes, two_rounds, all_alive(modes))],
    "dropped": [asdict(block) for block in interleave(modes, one_round, one_at_a_time(modes))],
}
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.destroy_process_group()
