"""The collectives of this room: the only file here that calls torch.distributed, or holds a group.

Gloo's all-to-all speaks with every rank even where nothing is sent, so a rank that is gone ends it on all others at
once. Its error names an address, not a rank. Whoever hears it closes its own connections first, so that ranks which
wait for a living one hear it, too; then all who are left sign a roll in the job's store.
"""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ServingGroup"]

ROLL_SECONDS = 3.0  # for those who are left to sign


class ServingGroup:
    """All ranks of the job. It is joined as torchrun says, and left again by `close`, if it was not open before.

    Args:
        timeout_seconds: for one exchange.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._is_mine = not dist.is_initialized()
        if self._is_mine and "RANK" in os.environ:
            dist.init_process_group("gloo")
        elif self._is_mine:
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(timeout=timedelta(seconds=timeout_seconds), backend="gloo")

    def agree(self, error: str) -> str:
        """The first error that a rank tells, with its name; empty if no rank does."""
        told: list[str] = [""] * self.workers
        self._heard(lambda: dist.all_gather_object(told, error, group=self._group))
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")

    def from_rank_0(self, number: int) -> int:
        """What rank 0 gave."""
        held = torch.tensor([number])
        self._heard(lambda: dist.broadcast(held, 0, group=self._group))
        return int(held)

    def all_to_all(self, leaving: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """
        Args:
            leaving: (neurons, ...), contiguous, receiver by receiver.
            counts: [sender][receiver], neurons.

        Returns:
            (neurons, ...), sender by sender.
        """
        arriving = [row[self.rank] for row in counts]
        found = leaving.new_empty(sum(arriving), *leaving.shape[1:])
        sent = list(counts[self.rank])
        self._heard(lambda: dist.all_to_all_single(found, leaving, arriving, sent, group=self._group))
        return found

    def close(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            dist.destroy_process_group(dist.group.WORLD if self._is_mine else group)

    def _heard(self, collective: Any) -> None:
        if self._group is None:
            raise RuntimeError("repurpose: this run is closed; call repurpose.serve again on every rank")
        try:
            collective()
        except RuntimeError as error:
            store, name = dist.distributed_c10d._get_default_store(), self._group.group_name
            dist.destroy_process_group(self._group)
            self._group = None
            gone = self._roll(store, f"armillary/repurpose/{name}")
            if self._is_mine:
                dist.destroy_process_group()
            named = ", ".join(f"rank {rank}" for rank in gone) or "no rank (a connection broke or was too slow)"
            raise RuntimeError(
                f"repurpose: gone or silent while rank {self.rank} exchanged activations with it: {named}; start the "
                f"job again on every rank. The group said: {error}"
            ) from error

    def _roll(self, store: Any, name: str) -> list[int]:
        """The ranks that do not sign in time. If the store is gone, rank 0 is: it keeps it, unless torchrun does."""
        until, gone = time.monotonic() + ROLL_SECONDS, []
        try:
            store.set(f"{name}/{self.rank}", "here")
            for rank in range(self.workers):
                try:
                    store.wait([f"{name}/{rank}"], timedelta(seconds=max(0.1, until - time.monotonic())))
                except dist.DistStoreError:
                    gone.append(rank)
        except RuntimeError:
            return [0]
        return gone
