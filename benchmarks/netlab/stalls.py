"""What the machine's congestion control does to a training step's messages: python -m benchmarks.netlab.stalls

8 hosts, 1 Gbit/s and 100 Mbit/s: two all-to-alls of 512 kB a rank and an all-reduce of 340 kB, asked for together, as
tables and the rest of a model ask for them. Prints a table, quartiles of 30 such rounds.
"""

import json
import os
import statistics
import sys
import time

import torch

from armillary.plans import AllReduce, AllToAll
from armillary.transport.transport import Transport
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.namespaces import tell

HOSTS, ROUNDS = 8, 30
FLOATS = 16_384  # of one piece
CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"


def main() -> None:
    print("| Mbit/s | congestion control | ms a round: median (quartiles) |\n| --- | --- | --- |")
    for mbit in (1000.0, 100.0):
        for control in ("reno", "bbr"):
            with Lab(HOSTS, mbit) as lab:
                for host in range(HOSTS):
                    tell("ip", "netns", "exec", lab.name.host(host), "sh", "-c", f"echo {control} > {CONTROL}")
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.netlab.stalls", "rank"]
                low, median, high = json.loads(lab.run(command, timeout_seconds=200, pin=True).outputs[0])
            print(f"| {mbit:g} | {control} | {median:.0f} ({low:.0f}-{high:.0f}) |", flush=True)


def one_rank() -> None:
    torch.set_num_threads(1)
    transport = Transport()
    even = (FLOATS,) * HOSTS
    seconds = []
    for _ in range(ROUNDS + 1):
        transport.barrier()
        begun = time.perf_counter()
        requests = [AllToAll(torch.zeros(FLOATS * HOSTS), even, even) for _ in range(2)]
        waits = [transport.start(one, "rows") for one in (*requests, AllReduce(torch.zeros(85_000)))]
        for wait in waits:
            wait()
        transport.barrier()
        seconds.append(time.perf_counter() - begun)
    if transport.place.rank == 0:
        print(json.dumps([1e3 * cut for cut in statistics.quantiles(seconds[1:], n=4)]))  # the first connects
    transport.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    one_rank() if sys.argv[1:] == ["rank"] else main()
