"""Measures what this job runs on: which ranks share a node, how fast the links between them are, how much memory each
may hold.

It takes a second or two at the start of a job, because a plan is only as good as the links it was priced with; a guess
is never put in their place.

Source: ring all-reduce as priced by Thakur, Rabenseifner and Gropp (2005): 2 (N - 1) messages one after another.
"""

import os
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from armillary.facts.collectives import AllReduce, Program, Scope
from armillary.facts.topology import Link, Topology
from armillary.runtime.transport import Transport

__all__ = ["fit_link", "free_memory_bytes", "measure", "workers_per_node"]

SIZES_BYTES = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
REPEATS = 5
CACHES = ("inactive_file ", "active_file ")  # pages of files: counted as used, given back when needed
LONGEST_SECONDS = 2.0  # a slow link is measured with fewer large messages


def workers_per_node(transport: Transport) -> int:
    """How many ranks share a node: what the launcher says, else by host name; 1 if nodes are uneven.

    Every rank gets the same answer.
    """
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    hosts = transport.share((launched, socket.gethostname()))
    workers = len(hosts)
    count = hosts[0][0] or sum(host == hosts[0] for host in hosts)
    nodes = [hosts[first : first + count] for first in range(0, workers, count)]
    is_even = workers % count == 0 and all(len(set(node)) == 1 for node in nodes)
    return count if is_even else 1


def measure(transport: Transport) -> Topology:
    """The nodes, links and memory of this job; every rank must call it, and every rank gets the same answer.

    A job on one node has seen no link between nodes, and a job of one rank per node none inside: the other link then
    stands for it. A job of one rank sends nothing; its link is the speed of a copy in memory.
    """
    place = transport.place
    memory = -transport.agree_largest([-free_memory_bytes() / place.workers_per_node])[0]
    backend = "gloo"
    if place.workers == 1:
        copied = Link(0.0, _copied_bytes_per_second())
        return Topology(1, 1, copied, copied, int(memory), backend)
    inside = _link(transport, "node", place.workers_per_node) if place.workers_per_node > 1 else None
    between = _link(transport, "rail", place.nodes) if place.nodes > 1 else None
    one = inside or between
    assert one is not None, f"{place=}"
    return Topology(place.nodes, place.workers_per_node, inside or one, between or one, int(memory), backend)


def free_memory_bytes() -> int:
    """Memory this machine, or the control group this process is in, has left."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0] != "max":
        cached = sum(int(line.split()[1]) for line in _lines("/sys/fs/cgroup/memory.stat") if line.startswith(CACHES))
        free = min(free, int(limit[0]) - int(used[0]) + cached)
    return max(free, 1)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def _link(transport: Transport, scope: Scope, ranks: int) -> Link:
    """Times all-reduces of growing size; the slowest rank counts, and every rank stops at the same size."""
    sent, seconds = [], []
    budget = LONGEST_SECONDS
    for size in SIZES_BYTES:
        spent = _all_reduce_seconds(transport, scope, size)
        sent.append(2 * (ranks - 1) / ranks * size)
        seconds.append(spent)
        budget -= spent * REPEATS
        if budget < 4 * spent * REPEATS:
            break
    return fit_link(sent, seconds, messages=2 * (ranks - 1))


def fit_link(sent_bytes: Sequence[float], seconds: Sequence[float], messages: int) -> Link:
    """The link behind measured times, sizes ascending: latency from the smallest, bandwidth from the largest.

    A least squares over sizes that differ by orders of magnitude would hardly see the latency.
    """
    latency = seconds[0] / messages
    beyond = max(seconds[-1] - seconds[0], 1e-9)
    return Link(latency, (sent_bytes[-1] - sent_bytes[0]) / beyond)


def _all_reduce_seconds(transport: Transport, scope: Scope, size: int) -> float:
    """Median of a few repeats, of the slowest rank."""
    tensor = torch.zeros(size // 4)
    spent = []
    for _ in range(REPEATS + 1):
        transport.barrier()
        began = time.perf_counter()
        transport.complete(_sum(tensor, scope), "measure")
        spent.append(time.perf_counter() - began)
    return transport.agree_largest([statistics.median(spent[1:])])[0]


def _sum(tensor: Tensor, scope: Scope) -> Program[Tensor]:
    total: Tensor = yield AllReduce(tensor, scope)
    return total


def _copied_bytes_per_second() -> float:
    source = torch.zeros(1 << 22)
    began = time.perf_counter()
    source.clone()
    return source.nbytes / max(time.perf_counter() - began, 1e-9)
