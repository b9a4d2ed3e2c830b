"""Put and take of one snapshot on one node, by turns: slots, and what a user would take in their place.

All ways end with the bytes in a row of a tensor that is there already. ADIOS2's SST wants two processes, so its writer
is a child, and each side takes its own time.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import redis
import torch
from torch.distributed import TCPStore

from armillary import feeds
from armillary.feeds.folder import ReaderFiles, Share
from benchmarks.in_situ.stores import Valkey, folder

ROWS = 8  # of the window


class Way(NamedTuple):
    """Seconds of a put and of a take, each a call."""

    put: Callable[[int, np.ndarray], float]
    take: Callable[[int, np.ndarray], float]


def timed(put: Callable[[int, np.ndarray], Any], take: Callable[[int, np.ndarray], Any]) -> Way:
    def clocked(act: Callable[[int, np.ndarray], Any]) -> Callable[[int, np.ndarray], float]:
        def run(step: int, array: np.ndarray) -> float:
            began = time.perf_counter()
            act(step, array)
            return time.perf_counter() - began

        return run

    return Way(clocked(put), clocked(take))


def slots(home: Path, check: bool = False) -> Way:
    store = f"{home}/slots{check}"
    writer, reader = feeds.Writer(store, keep=ROWS, check=check), ReaderFiles(store, Share(0, 1))

    def take(step: int, row: np.ndarray) -> None:
        reader.take(reader.look().waiting[0], lambda header: {"u": row})

    return timed(lambda step, array: writer.put(step, {"u": array}), take)


def fresh_files(home: Path) -> Way:
    def put(step: int, array: np.ndarray) -> None:
        with open(home / "draft", "wb") as file:
            file.write(array.data)
        os.rename(home / "draft", home / f"ready-{step}")

    def take(step: int, row: np.ndarray) -> None:
        with open(home / f"ready-{step}", "rb") as file:
            file.readinto(row.data)
        os.unlink(home / f"ready-{step}")

    return timed(put, take)


def valkey(client: redis.Redis) -> Way:
    def take(step: int, row: np.ndarray) -> None:
        row[:] = np.frombuffer(client.get(f"u{step}"), row.dtype)
        client.delete(f"u{step}")

    return timed(lambda step, array: client.set(f"u{step}", array.data.cast("B")), take)


def tcp_store() -> Way:
    store = TCPStore("127.0.0.1", 0, 1, True)

    def take(step: int, row: np.ndarray) -> None:
        row[:] = np.frombuffer(store.get(f"u{step}"), row.dtype)
        store.delete_key(f"u{step}")

    return timed(lambda step, array: store.set(f"u{step}", array.tobytes()), take)


def _sst_writer(name: str, orders: Any) -> None:
    import adios2

    io = adios2.Adios().declare_io("writer")
    io.set_engine("SST")
    io.set_parameters({"RendezvousReaderCount": "1", "QueueLimit": str(ROWS)})
    engine = variable = None
    while (array := orders.recv()) is not None:
        if engine is None:
            variable = io.define_variable("u", array, array.shape, [0], array.shape)
            engine = io.open(name, adios2.bindings.Mode.Write)
        began = time.perf_counter()
        engine.begin_step()
        engine.put(variable, array, adios2.bindings.Mode.Deferred)
        engine.end_step()
        orders.send(time.perf_counter() - began)
    if engine is not None:
        engine.close()


class Sst:
    """ADIOS2's streaming engine, in its usual settings."""

    def __init__(self, home: Path) -> None:
        import adios2

        self._name, self._mode = str(home / "sst"), adios2.bindings.Mode
        self._orders, theirs = multiprocessing.get_context("spawn").Pipe()
        self._child = multiprocessing.get_context("spawn").Process(target=_sst_writer, args=(self._name, theirs))
        self._child.start()
        self._io = adios2.Adios().declare_io("reader")
        self._io.set_engine("SST")
        self._engine: Any = None

    def put(self, step: int, array: np.ndarray) -> float:
        self._orders.send(array)
        if self._engine is None:
            self._engine = self._io.open(self._name, self._mode.Read)
        return float(self._orders.recv())

    def take(self, step: int, row: np.ndarray) -> float:
        began = time.perf_counter()
        self._engine.begin_step()
        self._engine.get(self._io.inquire_variable("u"), row, self._mode.Deferred)
        self._engine.end_step()
        return time.perf_counter() - began

    def close(self) -> None:
        self._orders.send(None)
        self._engine.close()
        self._child.join(10)


def crossing(mib: int, rounds: int) -> dict[str, Any]:
    """Medians and quartiles of put and take, in seconds, by way."""
    with folder() as home:
        server, sst = Valkey(home), Sst(home) if find_spec("adios2") else None  # a peer; no extra brings it
        try:
            ways = {
                "slots": slots(home), "slots, with checksum": slots(home, check=True), "fresh files": fresh_files(home),
                "Valkey, unix socket": valkey(redis.Redis(unix_socket_path=server.socket)),
                "Valkey, tcp": valkey(redis.Redis(port=server.port)), "TCPStore": tcp_store(),
            }  # fmt: skip
            if sst:
                ways["ADIOS2 SST"] = Way(sst.put, sst.take)
            found = _by_turns(ways, mib, rounds)
            if sst:
                sst.close()
        finally:
            server.kill()
    return {"mib": mib, "rounds": rounds, "seconds": found}


def _by_turns(ways: Mapping[str, Way], mib: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    array, window = np.random.default_rng(0).random(mib << 18, np.float32), torch.zeros(ROWS, mib << 18).numpy()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for step in range(rounds + 3):
        first = step % len(ways)  # whoever follows finds the caches as another left them
        for name, way in [*ways.items()][first:] + [*ways.items()][:first]:
            array[0], row = step, window[step % ROWS]
            seconds = way.put(step, array), way.take(step, row)
            if row[0] != step or not np.array_equal(row, array):
                raise RuntimeError(f"{name} brought another snapshot than {step}")
            if step >= 3:  # the first ones open files and connections
                taken[name].append(seconds)
    return {
        name: {
            "put": statistics.quantiles([put for put, _ in these], n=4),
            "take": statistics.quantiles([take for _, take in these], n=4),
            "sum": statistics.quantiles([put + take for put, take in these], n=4),
        }
        for name, these in taken.items()
    }
