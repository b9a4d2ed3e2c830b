"""The collectives of this room: the only file here that calls torch.distributed, or holds a group.

All ranks sign a roll in the job's store before they meet, so a rank that does not come is known by its number.
"""

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["PartsGroup"]

ROLL = "armillary/local_losses"


class PartsGroup:
    """All ranks of the job, or this process alone. It joins the job as torchrun says, and leaves it by `close`, if it
    was not joined before.

    Args:
        timeout_seconds: for the others to come, and for one exchange.

    Raises:
        RuntimeError: a rank did not come in time.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._group: Any = None
        self._joins = not dist.is_initialized()
        self.rank, self.workers = 0, 1
        if self._joins and "RANK" not in os.environ:
            return
        timeout = timedelta(seconds=timeout_seconds)
        if self._joins:
            self.rank, self.workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store = self._store(timeout)
            self._sign(store, timeout_seconds)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.workers, timeout=timeout)
        else:
            self.rank, self.workers = dist.get_rank(), dist.get_world_size()
            self._sign(dist.distributed_c10d._get_default_store(), timeout_seconds)
        self._group = dist.new_group(timeout=timeout, backend="gloo")

    def told(self, mine: Any) -> list[Any]:
        """What every rank tells, by rank."""
        found: list[Any] = [mine] * self.workers
        if self._group is not None:
            dist.all_gather_object(found, mine, group=self._group)
        return found

    def spread(self, tensor: Tensor, owner: int) -> None:
        """Every bit of the owner's tensor, into this one."""
        if self._group is None or not tensor.numel():
            return
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dist.broadcast(flat, owner, group=self._group)
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.dtype).reshape(tensor.shape))

    def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(dist.group.WORLD if self._joins else group)

    def _store(self, timeout: timedelta) -> Any:
        """The job's, without waiting for all."""
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_mine = self.rank == 0 and not is_agents
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                address, port, self.workers, is_mine, timeout, wait_for_workers=False
            )
        except dist.DistNetworkError as error:
            raise RuntimeError(f"local_losses: rank 0 did not come to {address}:{port} ({error})") from error

    def _sign(self, store: Any, timeout_seconds: float) -> None:
        call = store.add(f"{ROLL}/calls/{self.rank}", 1)
        store.set(f"{ROLL}/{call}/{self.rank}", "here")
        until, missing = time.monotonic() + timeout_seconds, []
        for rank in range(self.workers):
            try:
                store.wait([f"{ROLL}/{call}/{rank}"], timedelta(seconds=max(0.05, until - time.monotonic())))
            except dist.DistStoreError:
                missing.append(rank)
        if missing:
            store.delete_key(f"{ROLL}/{call}/{self.rank}")  # as if it had not called: it may again
            store.add(f"{ROLL}/calls/{self.rank}", -1)
            named = ", ".join(f"rank {rank}" for rank in missing)
            raise RuntimeError(
                f"local_losses: {named} did not call joined within {timeout_seconds:g} s; every rank must call it when "
                "its part is trained. Give it longer (timeout_seconds), or load the part's file"
            )
