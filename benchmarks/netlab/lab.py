"""N hosts on one machine, joined by links of a chosen speed, for programs written for torchrun.

Loopback has no speed and no bytes worth counting, and links decide what data-parallel training should
do. A lab is a real network in small: every host is a network namespace with one interface, `eth0`.
"""

import math
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.netlab import links
from benchmarks.netlab.counters import Counted
from benchmarks.netlab.namespaces import (
    LabName,
    namespaces_of,
    new_name,
    remove,
    require_tools,
    stop_processes,
)
from benchmarks.netlab.pinning import usable_processors
from benchmarks.netlab.ranks import Crowd, Finished, Rank, start, stop, wait

ROOT = Path(__file__).resolve().parents[2]  # of the repository: what `benchmarks` is imported from
FIRST_PORT = 29500
PORTS = 1000


def unwatched(_text: str) -> None:
    """What becomes of rank 0's output while a run lasts, if nobody wants to see it."""


class Lab:
    """A network that exists as long as its `with` block, or until its process dies, however it dies.

    Labs do not see one another, so several may be open at once; they do share the processor.

        with Lab(hosts=4, mbit_per_second=1000) as lab:
            lab.run([sys.executable, "train.py"])

    Args:
        hosts: how many, 1 to 250.
        mbit_per_second: speed of every link in each direction, in 10^6 bits; 0 leaves links unshaped.
        whole_packets: slow links pass up to 64 KiB as one. Otherwise they pass 1,514 bytes at a time, and the machine's
            processors do for all hosts what each host's network card does: 12 us a packet here.

    Raises:
        LabUnavailable: on entering: not root, no iproute2, or a kernel without namespaces or tbf.
    """

    def __init__(self, hosts: int, mbit_per_second: float, whole_packets: bool = False) -> None:
        if not 1 <= hosts <= links.MOST_HOSTS:
            raise ValueError(f"netlab: hosts must be 1 to {links.MOST_HOSTS}, got {hosts}")
        self.hosts, self.whole_packets = hosts, whole_packets
        self.mbit_per_second = _checked_speed(mbit_per_second)
        self.name = new_name()
        self._runs = 0
        self._warden: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Lab":
        require_tools()
        try:
            self._warden = _post_warden(self.name)
            links.lay(self.name, self.hosts)
            self.shape(self.mbit_per_second)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._close()

    def shape(self, mbit_per_second: float) -> None:
        """Sets the speed of every link, both directions, from now on; 0 takes the limit away."""
        speed = _checked_speed(mbit_per_second)
        links.shape(self.name, self.hosts, speed, self.whole_packets)
        self.mbit_per_second = speed

    def counters(self) -> tuple[Counted, ...]:
        """What the kernel counted on every host's link since the lab was opened, in host order."""
        return tuple(links.count(self.name, host) for host in range(self.hosts))

    def run(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = 600.0,
        pin: bool = False,
        watch: Callable[[str], object] = unwatched,
    ) -> Finished:
        """Runs `command` as every rank and waits for all of them.

        Args:
            command: a program and its arguments, the same for all; rank r runs on host r // ranks_per_host.
            ranks_per_host: ranks of one host talk over its `lo`, unshaped and uncounted, as on one machine.
            env: variables beside those of torchrun, over which they win.
            timeout_seconds: for the whole run.
            pin: where ranks outnumber the processors, run them as batch jobs, and keep each to one processor if as many
                come on each (`pinning.py`). Whatever a rank starts itself begins there, too.
            watch: is called with what rank 0 prints, as it comes.

        Raises:
            RankFailed: a rank failed; the others were stopped.
            TimeoutError: the run took too long; all ranks were stopped.
            LabUnavailable: `pin` without util-linux.
        """
        hosts = tuple(self.name.host(host) for host in range(self.hosts))
        if not set(hosts) <= set(namespaces_of(self.name)):
            raise RuntimeError(f"netlab: {self.name} is not open; use it inside `with Lab(...) as lab:`")
        # Another port for every run: the last one's may linger for a minute.
        processors = usable_processors() if pin else ()
        crowd = Crowd(hosts, ranks_per_host, links.address(0), FIRST_PORT + self._runs % PORTS, processors)
        self._runs += 1
        ranks: list[Rank] = []
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            try:
                for rank in range(crowd.world):
                    ranks.append(start(crowd, rank, command, env or {}, Path(folder)))
                wait(ranks, timeout_seconds, watch)
                seconds = time.perf_counter() - begun
            finally:
                stop(ranks)
                for host in hosts:
                    stop_processes(host)
            outputs = tuple(rank.output.read_text(errors="replace") for rank in ranks)
            errors = tuple(rank.error.read_text(errors="replace") for rank in ranks)
        return Finished(outputs, errors, seconds)

    def _close(self) -> None:
        remove(self.name)
        if self._warden is not None:  # last, so that it still watches if the removal is interrupted
            self._warden.kill()
            self._warden.communicate()
            self._warden = None


def _checked_speed(mbit_per_second: float) -> float:
    if not (math.isfinite(mbit_per_second) and mbit_per_second >= 0):
        raise ValueError(f"netlab: mbit_per_second must be 0 (unshaped) or more, got {mbit_per_second}")
    return mbit_per_second


def _post_warden(name: LabName) -> subprocess.Popen[str]:
    """Starts the process that removes the lab should this one die, and returns once it watches."""
    warden = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.netlab.warden", str(name.pid), str(name.start), str(name.opened)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C must not reach it
    )
    assert warden.stdout is not None
    if warden.stdout.readline() != "ready\n":
        warden.kill()
        warden.communicate()
        raise RuntimeError("netlab: the process that cleans up if this one is killed did not start")
    return warden
