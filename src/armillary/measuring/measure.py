"""Measures what a job runs on: which ranks share a node, its links, how fast rows are handled, how much memory is free.

It takes a second or two at the start of a job, because a plan is only as good as the links it was priced with.
`armillary measure` looks longer. Rank 0 says how far it is, since a start of some seconds in silence looks stuck.

A plan is for the model as a whole, so what its weights, gradients and optimizer state take already counts as free.
Buffers do not: no forecast counts them.
"""

import itertools
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from armillary.measuring.links import QUICK, BesideCompute, Effort, beside_seconds, hidden_share, request_link, sides
from armillary.measuring.processor import Timer, coding_rates, landing_seconds, processor, update_rates
from armillary.plans.topology import Link, Processor, RequestLink, Topology
from armillary.plans.units import seconds_text
from armillary.transport.transport import Transport

__all__ = ["free_memory_bytes", "measure", "measure_links", "ranks_beside", "with_memory_budget", "workers_per_node"]


def with_memory_budget(model: nn.Module, optimizer: Optimizer, topology: Topology, transport: Transport) -> Topology:
    """Collective: the topology, with the memory that these hold on the rank where they hold least.

    Args:
        topology: measured beside them.
    """
    device = "cpu" if topology.backend == "gloo" else "cuda"
    there = sum(tensor.nbytes for tensor in _held(model, optimizer) if tensor.device.type == device)
    (least,) = transport.agree_largest([-float(there)])
    return replace(topology, memory_bytes=topology.memory_bytes - int(least))


def _held(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    for parameter in model.parameters():
        gradient = parameter.grad
        yield parameter
        if gradient is not None:
            yield gradient._values() if gradient.is_sparse else gradient
    for state in optimizer.state.values():
        yield from (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


CACHES = ("inactive_file ", "active_file ")  # pages of files: counted as used, given back when needed
BLOCK_SECONDS = 0.008  # of a rank alone: a few turns of a scheduler
CPU = torch.device("cpu")


def _silent(*_: object) -> None:
    """Nobody is listening."""


def workers_per_node(transport: Transport) -> int:
    """How many ranks share a node: what the launcher says, else by host name, as where a part of a node takes part; 1
    if nodes are uneven.

    Every rank gets the same answer.
    """
    return _even(transport.share(_host())) or 1


class _Host(NamedTuple):
    """Where a rank runs. launched: how many ranks the launcher started there, 0 if it does not say."""

    launched: int
    name: str


def _even(hosts: Sequence[_Host]) -> int:
    """How many ranks each host holds; 0 if they hold different numbers."""
    (launched, name), workers = hosts[0], len(hosts)
    for count in (launched, sum(other == name for _, other in hosts)):
        nodes = [hosts[first : first + count] for first in range(0, workers, count or workers)]
        if count and workers % count == 0 and all(len(set(node)) == 1 for node in nodes):
            return count
    return 0


def _uneven(hosts: Sequence[_Host]) -> tuple[int, ...]:
    """How many ranks each host holds, in the order of ranks; empty if each holds as many."""
    return () if _even(hosts) else tuple(len([*ranks]) for _, ranks in groupby(name for _, name in hosts))


def ranks_beside(transport: Transport) -> int:
    """How many ranks share the memory of this one's host, by name and by the launcher, itself among them. Some may take
    no part, or be of other nodes."""
    hosts: list[_Host] = transport.share(_host())
    launched, name = _host()
    return max(launched, sum(other == name for _, other in hosts))


def _host() -> _Host:
    return _Host(int(os.environ.get("LOCAL_WORLD_SIZE", "0")), socket.gethostname())


def measure(
    transport: Transport,
    effort: Effort = QUICK,
    device: torch.device = CPU,
    told: Callable[[str], None] = _silent,
    begins: Callable[[int, int], None] = _silent,
) -> Topology:
    """The nodes, links, processor and memory of this job; every rank must call it, and every rank gets the same answer.

    A job on one node has seen no link between nodes, and a job of one rank per node none inside: the other link then
    stands for it. A job of one rank sends nothing; its link is the speed of a copy in memory.

    Args:
        device: whose links are meant; tensors on "cuda" travel by NCCL where the job was started with it.
        told: hears of every measurement as it is made. begins: before each, hears its number and how many there are.
    """
    place = transport.place
    beside = ranks_beside(transport)
    free = free_memory_bytes() / beside if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    memory = int(-transport.agree_largest([-float(free)])[0])
    backend = "gloo" if device.type == "cpu" else "nccl"
    asked = [(kind, side, ranks) for side, ranks in sides(transport) for kind in effort.kinds]
    overlaps = backend == "gloo" and bool(asked)
    numbers, count = itertools.count(1), len(asked) + 1 + 2 * overlaps

    def begin() -> None:
        begins(next(numbers), count)

    found = []
    for kind, side, ranks in asked:
        begin()
        found.append(request_link(transport, kind, side, ranks, effort, device))
        told(f"{kind} {side} nodes: {_link_text(found[-1].link)}")
    begin()
    timer = Timer(BLOCK_SECONDS, transport.agree_largest, device)
    rates = processor(device, BLOCK_SECONDS, transport.agree_largest)
    (landing,) = transport.agree_largest([landing_seconds(timer)])
    rates = replace(rates, updates=update_rates(timer), landing_seconds=landing)
    told(f"memory: {rates.memory_bytes_per_second / 1e9:.1f} GB/s read and written")
    each = ", ".join(seconds_text(one.tensor_seconds) for one in rates.updates)
    told(f"a small tensor: {each} in a step of SGD, momentum, Adam; {seconds_text(landing)} as a gradient collected")
    share, busy = 1.0, dict[str, BesideCompute]()
    if overlaps:
        begin()
        share = hidden_share(transport)
        begin()
        busy = beside_seconds(transport, effort.kinds)
        found = [_beside_compute(one, busy[one.request]) for one in found]
    told(f"overlap: {share:.0%} of a request hides behind compute")
    for kind, one in busy.items():
        told(f"{kind} beside compute: {seconds_text(one.seconds)} of a processor, however small")
    inside, between = _links(found, rates)
    topology = Topology(
        place.nodes,
        place.workers_per_node,
        inside,
        between,
        memory,
        backend,
        tuple(found),
        rates,
        share,
        _uneven(transport.share(_host())),
    )
    if not effort.times_coding or device.type != "cpu":
        return topology
    coding = coding_rates(topology, timer)
    for rate in coding:
        told(f"{rate.exchange}: {seconds_text(rate.million_seconds)} of a processor a million values")
    return replace(topology, processor=replace(rates, coding=coding))


def _beside_compute(one: RequestLink, beside: BesideCompute) -> RequestLink:
    """Its scatter is that of both: what a small request takes on its way, and of the processor."""
    latency = one.link.latency_seconds
    whole = max(latency + beside.seconds, 1e-9)
    scatter = math.hypot(latency * one.scatter, beside.scatter_seconds) / whole
    return replace(one, beside_seconds=beside.seconds, scatter=scatter)


def _links(found: list[RequestLink], rates: Processor) -> tuple[Link, Link]:
    """Inside and between, as an all-reduce finds them."""
    by_side = {one.side: one.link for one in found if one.request == "AllReduce"}
    one = next(iter(by_side.values()), Link(0.0, rates.memory_bytes_per_second / 2))
    return by_side.get("inside", one), by_side.get("between", one)


def _link_text(link: Link) -> str:
    return f"{seconds_text(link.latency_seconds)} a message, {link.bytes_per_second * 8 / 1e9:.3g} Gbit/s"


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


def measure_links(transport: Transport) -> Topology:
    """Collective; every rank gets the same. Rank 0 writes to stderr: on a terminal one line that changes, else one line
    each."""
    ends = "\r" if sys.stderr.isatty() else "\n"

    def says(number: int, count: int) -> None:
        if transport.place.rank == 0:
            last = "\n" if number == count else ends
            print(f"armillary: measuring links {number} of {count}", end=last, file=sys.stderr, flush=True)

    return measure(transport, begins=says)
