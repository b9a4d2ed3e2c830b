"""The network namespaces of labs: their names, the commands that make them, and how they are removed.

A named namespace outlives the process that made it, so a lab that was killed leaves its hosts behind.
The name therefore says who made it, `arm-<pid>-<start>-<opened>-<part>`: `pid` and `start` name one
process for good, also when its pid is used again, and `opened` tells its labs apart. What such a name says
of a dead process may be removed by anyone.

Source: ip-netns(8); proc(5), field 22 of /proc/<pid>/stat.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

NAMED = Path("/run/netns")
PATTERN = re.compile(r"arm-(?P<pid>\d+)-(?P<start>\d+)-(?P<opened>\d+)-(?P<part>switch|host\d+)")
KILL_SECONDS = 5.0  # a killed process leaves its namespace within milliseconds unless it hangs in the kernel


class LabUnavailable(RuntimeError):
    """This machine cannot carry a lab; the message says what is missing, in one line."""


@dataclass(frozen=True)
class LabName:
    """Which lab of which process: the common beginning of the names of its namespaces."""

    pid: int
    start: int  # clock ticks since boot
    opened: int  # nanoseconds of the monotonic clock

    def __post_init__(self) -> None:
        if self.pid < 1 or self.start < 0 or self.opened < 0:
            raise ValueError(f"namespaces: no process has made a lab {self}; want pid >= 1 and times >= 0")

    @property
    def switch(self) -> str:
        """The namespace of the bridge, which keeps even the bridge out of the machine's own network."""
        return f"{self}-switch"

    def host(self, index: int) -> str:
        return f"{self}-host{index}"

    def __str__(self) -> str:
        return f"arm-{self.pid}-{self.start}-{self.opened}"


def new_name() -> LabName:
    """A name for the next lab of this process."""
    pid = os.getpid()
    start = start_ticks(pid)
    assert start is not None, "this process is alive"
    return LabName(pid, start, time.monotonic_ns())


def name_of(namespace: str) -> LabName | None:
    """The lab a namespace belongs to; None if it is no lab's."""
    match = PATTERN.fullmatch(namespace)
    return LabName(int(match["pid"]), int(match["start"]), int(match["opened"])) if match else None


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or only waits to be reaped."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, start = words[0], words[19]
    return None if state in "ZX" else int(start)


def is_owned(name: LabName) -> bool:
    """Whether the process that made the lab still lives."""
    return start_ticks(name.pid) == name.start


def require_tools() -> None:
    """
    Raises:
        LabUnavailable: not root, or no iproute2. Both are needed, and loopback is no replacement.
    """
    if os.geteuid() != 0:
        raise LabUnavailable(f"netlab: needs root to make network namespaces, running as uid {os.geteuid()}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LabUnavailable(f"netlab: needs iproute2, found no {' and no '.join(missing)} on PATH; install it")


def tell(*command: str, lines: str = "") -> str:
    """Runs one command of iproute2, `lines` on its standard input, and returns what it printed.

    Raises:
        LabUnavailable: the kernel or the command refuses, in its own words.
    """
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabUnavailable(f"netlab: `{' '.join(command)}` was refused: {said}")
    return done.stdout


def namespaces_of(name: LabName) -> list[str]:
    return [namespace for namespace in _named() if name_of(namespace) == name]


def stop_processes(namespace: str) -> None:
    """Kills whatever runs inside a namespace and waits until it is gone.

    Raises:
        RuntimeError: something in it cannot be killed.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while pids := [int(word) for word in tell("ip", "netns", "pids", namespace).split()]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"netlab: processes {pids} in {namespace} outlive SIGKILL; see their state in ps")
        for pid in pids:
            _kill(pid)
        time.sleep(0.005)


def remove(name: LabName) -> list[str]:
    """Ends a lab: kills what runs in its namespaces, deletes them, and returns their names.

    A veth pair goes with either of its ends and a bridge with its namespace, so nothing else is left.
    """
    return [namespace for namespace in namespaces_of(name) if _delete(namespace)]


def sweep() -> list[str]:
    """Removes the labs of dead processes and returns the names of the namespaces deleted."""
    require_tools()
    labs = {name for namespace in _named() if (name := name_of(namespace)) is not None}
    return [gone for name in sorted(labs, key=str) if not is_owned(name) for gone in remove(name)]


def _delete(namespace: str) -> bool:
    """Whether this call deleted it: a warden and a sweep may both be at work on the same lab."""
    try:
        stop_processes(namespace)
        tell("ip", "netns", "delete", namespace)
    except LabUnavailable:
        if (NAMED / namespace).exists():
            raise
        return False
    return True


def _named() -> list[str]:
    return sorted(path.name for path in NAMED.iterdir()) if NAMED.is_dir() else []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it ended by itself between being listed and being killed
