"""What one rank does in the self-check: all-reduces of a known size, timed and counted."""

import json
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.netlab.counters import counted_bytes


def main(tensor_bytes: int, repetitions: int) -> None:
    """Rank 0 prints one line of JSON: its seconds per all-reduce, every rank's bytes sent per all-reduce."""
    dist.init_process_group("gloo")
    tensor = torch.zeros(tensor_bytes // 4)
    dist.all_reduce(tensor)  # opens the connections
    dist.barrier()
    before = counted_bytes()
    seconds = [_timed(tensor) for _ in range(repetitions)]
    sent_bytes = torch.tensor([(counted_bytes() - before).sent_bytes / repetitions], dtype=torch.float64)
    everyone = [torch.empty_like(sent_bytes) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, sent_bytes)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "sent_bytes": torch.cat(everyone).tolist()}))
    dist.destroy_process_group()


def _timed(tensor: torch.Tensor) -> float:
    dist.barrier()  # else a rank that comes late is counted as a slow link
    begun = time.perf_counter()
    dist.all_reduce(tensor)
    seconds = time.perf_counter() - begun
    dist.barrier()
    return seconds


if __name__ == "__main__":
    main(tensor_bytes=int(sys.argv[1]), repetitions=int(sys.argv[2]))
