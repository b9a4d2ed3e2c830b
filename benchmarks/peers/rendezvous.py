"""Horovod inside a lab: one turn of it, from start to shutdown, in a process that trains by other frameworks too.

Between its turns it must be gone: its thread asks around all the time, on the links and the processors of the others.
`horovodrun` is not used, as ranks are here already; the variables it would set are set, and rank 0 holds the server
where ranks find one another. Horovod 0.28.1 makes one connection (of its process sets) to whatever the host name
means, not to the interface it was told; so each rank names its host by its address, in a namespace of names of its own.

Source: horovod/runner/gloo_run.py of 0.28.1.
"""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import horovod.torch as hvd
import torch.distributed as dist
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousServer

CLONE_NEWUTS = 0x04000000
SIOCGIFADDR = 0x8915


@contextmanager
def horovod() -> Iterator[None]:
    """Horovod runs inside the block; every rank enters it."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    address = _name_host_by_address(os.environ["GLOO_SOCKET_IFNAME"])
    server = RendezvousServer() if rank == 0 else None
    told: list[object] = [address, server.start() if server else None]
    addresses: list[str] = [address] * workers
    dist.all_gather_object(addresses, address)
    if server:
        server.init([SlotInfo(each, r, 0, r, workers, 1, workers) for r, each in enumerate(addresses)])
    dist.broadcast_object_list(told)
    os.environ |= _variables(rank, workers, address) | {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": str(told[0]),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(told[1]),
    }
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        dist.barrier()
        if server:
            server.stop()


def _variables(rank: int, workers: int, address: str) -> dict[str, str]:
    """What `horovodrun --gloo` sets for a host with one rank."""
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(workers),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(rank),
        "HOROVOD_CROSS_SIZE": str(workers),
        "HOROVOD_HOSTNAME": address,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": os.environ["GLOO_SOCKET_IFNAME"],
    }


def _name_host_by_address(interface: str) -> str:
    """This thread's, and those it starts; returns the address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
    address = socket.inet_ntoa(found[20:24])
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "rendezvous: no namespace of names for this rank; the lab needs root")
    socket.sethostname(address)
    return address
