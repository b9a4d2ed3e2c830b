"""A crew of rank processes, started once a session; a job is a plain function of (rank, world, *args)."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Crew:
    """`world` processes joined by gloo. A job that raises on some ranks only may leave the others waiting: jobs that test
    errors must raise on every rank, or catch."""

    def __init__(self, world: int):
        fork = multiprocessing.get_context("forkserver")
        fork.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "armillary"])
        self.world = world
        self.inboxes = [fork.SimpleQueue() for _ in range(world)]
        self.outbox = fork.SimpleQueue()
        port = _free_port()
        self.ranks = [
            fork.Process(target=_serve, args=(rank, world, port, inbox, self.outbox), daemon=True)
            for rank, inbox in enumerate(self.inboxes)
        ]
        for process in self.ranks:
            process.start()

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs job(rank, world, *args) on every rank; their answers in rank order."""
        for inbox in self.inboxes:
            inbox.put((job, args))
        replies = sorted((self.outbox.get() for _ in range(self.world)), key=lambda reply: reply[0])
        failed = [f"rank {rank}:\n{text}" for rank, fine, text in replies if not fine]
        assert not failed, "\n".join(failed)
        return [answer for _, _, answer in replies]

    def dismiss(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)
        for process in self.ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
