"""This process in its job: joined as torchrun describes it, and left.

Requests are `transport.py`'s; its groups are its own, so what is started here may as well be the user's.
"""

import atexit
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["refuse_no_member", "start_process_group", "stop_process_group", "workers_in"]


JOIN_SECONDS = 600.0  # until every rank of the job has started


def start_process_group() -> None:
    """Joins the job torchrun describes in the environment; alone, it becomes a job of one.

    The group keeps torch's own timeout: its collectives are the user's, not ours. A store prefix per restart attempt
    keeps a restarted gloo job from reading the addresses of the one that died (torchrun reuses its store on one node).
    """
    if dist.is_initialized():
        return
    atexit.register(stop_process_group)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if "RANK" not in os.environ:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
        return
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        workers,
        is_master=rank == 0 and not agents,
        timeout=timedelta(seconds=JOIN_SECONDS),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = dist.PrefixStore(f"armillary/attempt{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=workers)


def workers_in(process_group: Any) -> int:
    """How many ranks a group has; None is the job, which is joined for that.

    Raises:
        ValueError: this rank is not in it.
    """
    start_process_group()
    refuse_no_member(process_group)
    return dist.get_world_size(process_group)


def refuse_no_member(process_group: Any) -> None:
    """
    Raises:
        ValueError: this rank is not in the group.
    """
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise ValueError(
            f"process_group: rank {dist.get_rank()} of the job is not one of its ranks; call parallelize, attach or "
            "auto_plan on those only, as in `if dist.get_rank() in ranks:`"
        )


def stop_process_group() -> None:
    """Leaves the job. A process that ends without it may abort, its gloo threads still running."""
    if dist.is_initialized():
        dist.destroy_process_group()
