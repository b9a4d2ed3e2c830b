"""What each host of the network lab runs: host 0 is the Redis server of all, the others put and take.

usage, inside the lab: python -m benchmarks.in_situ.host_of_lab ROUNDS
"""

import json
import os
import sys
import time

import numpy as np
import redis
import torch

from armillary import feeds
from benchmarks.in_situ.hosts import MIB, moments
from benchmarks.in_situ.stores import Valkey, folder

PORT = 6399


def main(rounds: int) -> None:
    rank, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if rank == 0:
        with folder() as home:
            server = Valkey(home, "--protected-mode", "no", "--bind", "0.0.0.0", port=PORT)
            client = redis.Redis(port=PORT)
            for _ in range(1, hosts):
                client.blpop(["done"], timeout=600)
            server.kill()
        return
    client = redis.Redis(host=os.environ["MASTER_ADDR"], port=PORT)
    _until_answered(client)
    store, array = f"redis://{os.environ['MASTER_ADDR']}:{PORT}/host{rank}", np.zeros(MIB << 18, np.float32)
    window, seconds = feeds.Latest(8), []
    with feeds.Writer(store) as writer, feeds.Stream(store, window=window, batch=1, reader=(0, 1)) as stream:
        batches = iter(stream)
        writer.put(0, {"u": array})
        next(batches)
        client.incr("ready")
        while int(client.get("ready")) < hosts - 1:
            time.sleep(0.05)
        began = time.monotonic()
        for step, moment in enumerate(moments(rank, rounds), 1):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            at = time.perf_counter()
            writer.put(step, {"u": array})
            next(batches)
            seconds.append(time.perf_counter() - at)
    client.rpush("done", rank)
    print(json.dumps(seconds), flush=True)


def _until_answered(client: redis.Redis) -> None:
    for _ in range(600):
        try:
            client.ping()
            return
        except redis.ConnectionError:
            time.sleep(0.1)
    raise RuntimeError("the server did not answer within a minute")


if __name__ == "__main__":
    main(int(sys.argv[1]))
