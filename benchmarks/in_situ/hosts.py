"""1, 2, 4 and 8 hosts, each with files of its own, beside one Redis server for all of them.

A host is a process that puts a snapshot of 1 MiB and takes it, four times a second, each at a random moment of its
quarter: hosts do not keep step. All hosts are on one machine, which they share: what grows with their number in files
is the machine. Redis is seen by loopback, which has no speed, and in the network lab, where the server is a host
behind a link. Eight hosts send 268 Mbit/s each way.
"""

import json
import multiprocessing
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from armillary import feeds
from benchmarks.in_situ.stores import Valkey, folder
from benchmarks.netlab import Lab

PER_SECOND, MIB = 4, 1
FORK = multiprocessing.get_context("fork")


def moments(host: int, rounds: int) -> list[float]:
    """Seconds from the beginning at which this host puts: one random moment in each quarter of a second."""
    draw = random.Random(host)
    return [(step + draw.random()) / PER_SECOND for step in range(rounds)]


def _host(store: str, number: int, rounds: int, begin: Any, out: Any) -> None:
    torch.set_num_threads(1)
    array, seconds = np.random.default_rng(number).random(MIB << 18, np.float32), []
    window = feeds.Latest(8)
    with feeds.Writer(store, keep=4) as writer, feeds.Stream(store, window=window, batch=1, reader=(0, 1)) as stream:
        batches = iter(stream)
        writer.put(0, {"u": array})
        next(batches)
        begin.wait()
        began = time.monotonic()
        for step, moment in enumerate(moments(number, rounds), 1):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            at = time.perf_counter()
            writer.put(step, {"u": array})
            next(batches)
            seconds.append(time.perf_counter() - at)
    out.put(seconds)


def in_lab(count: int, rounds: int, mbit: int) -> dict[str, Any]:
    """The same, of hosts that reach one Redis server by links of so many Mbit/s. Needs root and iproute2."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.in_situ.host_of_lab", str(rounds)]
    with Lab(count + 1, mbit) as lab:
        finished = lab.run(command, timeout_seconds=300, pin=True)
    seconds = [one for output in finished.outputs[1:] for one in json.loads(output.strip().splitlines()[-1])]
    return {"hosts": count, "kind": f"redis at {mbit} Mbit/s", "seconds": statistics.quantiles(seconds, n=4)}


def hosts(count: int, kind: str, rounds: int) -> dict[str, Any]:
    """Quartiles of the seconds of put and take, over all hosts."""
    with folder() as home:
        server = Valkey(home) if kind == "redis" else None
        try:
            return {"hosts": count, "kind": kind, "seconds": _seconds(home, server, count, rounds)}
        finally:
            if server:
                server.kill()


def _seconds(home: Path, server: Valkey | None, count: int, rounds: int) -> list[float]:
    begin, out = FORK.Barrier(count), FORK.Queue()
    stores = [server.url(f"host{number}") if server else f"{home}/host{number}" for number in range(count)]
    started = [FORK.Process(target=_host, args=(store, n, rounds, begin, out)) for n, store in enumerate(stores)]
    for one in started:
        one.start()
    found = [seconds for _ in started for seconds in out.get(timeout=60 + rounds)]
    for one in started:
        one.join()
    return statistics.quantiles(found, n=4)
