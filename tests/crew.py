"""A crew of rank processes, kept for many tests; a job is a plain function of (rank, world, *args)."""

import contextlib
import faulthandler
import gc
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forked import begin, forkserver, free_port

GRACE_SECONDS = 5.0
JOB_SECONDS = 100.0
MOST_JOBS = 200  # of one crew
TIDY = "tidy"  # the order that follows each job


def _stacks_of(process: int | None) -> Path:
    """Where a rank writes what its threads are doing, when it is asked."""
    return Path(tempfile.gettempdir()) / f"armillary-crew-{process}.stacks"


def _serve(rank: int, world: int, port: int, inbox: Any, outbox: Any) -> None:
    begin()
    faulthandler.register(signal.SIGUSR1, _stacks_of(os.getpid()).open("w"))  # also of a rank that hangs in C code
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while (order := inbox.get()) is not None:
        if order == TIDY:
            _tidy()
            continue
        job, args = order
        try:
            outbox.put((rank, True, job(rank, world, *args)))
        except BaseException:
            outbox.put((rank, False, traceback.format_exc()))
    dist.destroy_process_group()


def _tidy() -> None:
    """Closes the groups that a job left open: each has threads that wake a hundred times a second for ever. It waits
    until every rank has ended its job, since no rank may lose a group while another still speaks on it."""
    world = dist.distributed_c10d._world
    left = [group for group in world.pg_map if group is not dist.group.WORLD]
    for group in left:
        dist.destroy_process_group(group)
    if left:
        left.clear()
        gc.collect()


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
        stacks: list[str] = []
        deadline = time.monotonic() + JOB_SECONDS
        while len(replies) < self.world:
            try:
                replies.append(self.outbox.get(timeout=max(0.01, deadline - time.monotonic())))
            except queue.Empty:
                late = sorted({*range(self.world)} - {rank for rank, _, _ in replies})
                stacks = [f"rank {rank}, late:\n{self._stacks(rank)}" for rank in late]
                self.disband()
                break
            if not replies[-1][1]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not self.is_disbanded and all(fine for _, fine, _ in replies):  # else somebody may speak on a group yet
            for inbox in self.inboxes:
                inbox.put(TIDY)
        failed = [f"rank {rank}:\n{text}" for rank, fine, text in replies if not fine] + stacks
        assert not failed, "\n".join(failed)
        return [answer for _, _, answer in sorted(replies, key=lambda reply: reply[0])]

    def _stacks(self, rank: int) -> str:
        process = self.ranks[rank].pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
            time.sleep(0.5)
        told = _stacks_of(process)
        return told.read_text() if told.exists() else "gone"

    @property
    def is_worn(self) -> bool:
        """Whether the next test should have another one."""
        return self.is_disbanded or self.jobs >= MOST_JOBS

    def disband(self) -> None:
        """At once, whatever the ranks are doing."""
        self.is_disbanded = True
        for process in self.ranks:
            process.kill()
            _stacks_of(process.pid).unlink(missing_ok=True)

    def dismiss(self) -> None:
        if self.is_disbanded:
            return
        for inbox in self.inboxes:
            inbox.put(None)
        for process in self.ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
            _stacks_of(process.pid).unlink(missing_ok=True)
