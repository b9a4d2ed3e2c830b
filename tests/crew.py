"""A crew of rank processes, kept for many tests; a job is a plain function of (rank, world, *args)."""

import os
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from forked import forkserver, free_port

GRACE_SECONDS = 5.0
JOB_SECONDS = 100.0
MOST_JOBS = (
    40  # of one crew: jobs leave gloo groups open, and each idle thread of theirs wakes a hundred times a second
)


def _serve(rank: int, world: int, port: int, inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while (order := inbox.get()) is not None:
        job, args = order
        try:
            outbox.put((rank, True, job(rank, world, *args)))
        except BaseException:
            outbox.put((rank, False, traceback.format_exc()))
    dist.destroy_process_group()


class Crew:
    """`world` processes joined by gloo. If a job raises on some ranks, the others may wait for them for ever: they are
    given `GRACE_SECONDS`, then the crew is disbanded (a new one is started for the next test) and the first error told.
    """

    def __init__(self, world: int):
        fork = forkserver()
        self.world = world
        self.is_disbanded = False
        self.jobs = 0
        self.inboxes = [fork.SimpleQueue() for _ in range(world)]
        self.outbox = fork.Queue()
        port = free_port()
        self.ranks = [
            fork.Process(target=_serve, args=(rank, world, port, inbox, self.outbox), daemon=True)
            for rank, inbox in enumerate(self.inboxes)
        ]
        for process in self.ranks:
            process.start()

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs job(rank, world, *args) on every rank; their answers in rank order."""
        self.jobs += 1
        for inbox in self.inboxes:
            inbox.put((job, args))
        replies: list[tuple[int, bool, Any]] = []
        deadline = time.monotonic() + JOB_SECONDS
        while len(replies) < self.world:
            try:
                replies.append(self.outbox.get(timeout=max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                self.disband()
                break
            if not replies[-1][1]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        failed = [f"rank {rank}:\n{text}" for rank, fine, text in replies if not fine]
        assert not failed, "\n".join(failed)
        assert not self.is_disbanded, f"ranks {sorted(reply[0] for reply in replies)} answered in {JOB_SECONDS} s"
        return [answer for _, _, answer in sorted(replies, key=lambda reply: reply[0])]

    @property
    def is_worn(self) -> bool:
        """Whether the next test should have another one."""
        return self.is_disbanded or self.jobs >= MOST_JOBS

    def disband(self) -> None:
        """At once, whatever the ranks are doing."""
        self.is_disbanded = True
        for process in self.ranks:
            process.kill()

    def dismiss(self) -> None:
        if self.is_disbanded:
            return
        for inbox in self.inboxes:
            inbox.put(None)
        for process in self.ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
