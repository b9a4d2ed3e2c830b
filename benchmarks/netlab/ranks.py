"""The ranks of one run: started each in the namespace of its host, watched, and all ended when one fails.

Every rank finds the variables torchrun sets, so a script runs here unchanged. Output goes to files: a
pipe that nobody reads would stop a talkative rank, and last words must survive the one who spoke them.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.netlab.counters import INTERFACE
from benchmarks.netlab.pinning import prefix

POLL_SECONDS = 0.02
LAST_WORDS_SECONDS = 0.3  # so that all who fail together have spoken before the first of them is picked
SHOWN_CHARACTERS = 4000


class RankFailed(RuntimeError):
    """A rank ended with another exit code than 0; the message holds its standard error."""


@dataclass(frozen=True)
class Finished:
    """What a run in which every rank ended well left behind; strings in rank order."""

    outputs: tuple[str, ...]  # standard output
    errors: tuple[str, ...]  # standard error
    seconds: float  # from the start of the first rank to the end of the last


@dataclass(frozen=True)
class Rank:
    """One running rank and where its words go."""

    index: int
    host: int
    process: subprocess.Popen[bytes]
    output: Path
    error: Path

    def last_words(self) -> str:
        return self.error.read_text(errors="replace")[-SHOWN_CHARACTERS:].strip() or "(nothing on standard error)"


@dataclass(frozen=True)
class Crowd:
    """How ranks are laid over hosts: rank = host * ranks_per_host + local rank, as torchrun numbers them."""

    namespaces: tuple[str, ...]  # one a host
    ranks_per_host: int
    master_address: str
    master_port: int
    processors: tuple[int, ...] = ()  # that ranks are dealt out over; none: the kernel does as it likes

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1:
            raise ValueError(f"netlab: ranks_per_host must be at least 1, got {self.ranks_per_host}")

    @property
    def world(self) -> int:
        return len(self.namespaces) * self.ranks_per_host


def torchrun_variables(crowd: Crowd, rank: int) -> dict[str, str]:
    """What torchrun tells a rank, and what gloo must know: without an interface it would choose loopback."""
    host, local = divmod(rank, crowd.ranks_per_host)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(crowd.world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(crowd.ranks_per_host),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": crowd.master_address,
        "MASTER_PORT": str(crowd.master_port),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",  # rank 0 is shown while it runs
    }


def words(crowd: Crowd, rank: int, command: Sequence[str]) -> list[str]:
    """The command line of one rank: on its host, and on its processor if ranks are dealt out."""
    kept = prefix(rank, crowd.world, crowd.processors) if crowd.processors else ()
    return ["ip", "netns", "exec", crowd.namespaces[rank // crowd.ranks_per_host], *kept, *command]


def start(crowd: Crowd, rank: int, command: Sequence[str], env: Mapping[str, str], folder: Path) -> Rank:
    """Starts one rank; its output goes to files in `folder`, and `env` wins over every other variable."""
    host = rank // crowd.ranks_per_host
    output, error = folder / f"{rank}.out", folder / f"{rank}.err"
    with output.open("wb") as out, error.open("wb") as err:
        process = subprocess.Popen(
            words(crowd, rank, command),
            env={**os.environ, **torchrun_variables(crowd, rank), **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # Ctrl-C is for the one who started the run, who then ends the ranks
        )
    return Rank(rank, host, process, output, error)


def wait(ranks: Sequence[Rank], timeout_seconds: float, watch: Callable[[str], object]) -> None:
    """Waits until every rank has ended with 0, handing what rank 0 prints to `watch` as it comes.

    Raises:
        RankFailed: a rank ended otherwise; it holds the words of the first.
        TimeoutError: some still run after `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    with ranks[0].output.open(errors="replace") as shown:
        while True:
            codes = [rank.process.poll() for rank in ranks]
            if news := shown.read():
                watch(news)
            if any(codes):
                time.sleep(LAST_WORDS_SECONDS)
                raise RankFailed(_failure(ranks))
            running = [rank for rank, code in zip(ranks, codes) if code is None]
            if not running:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(_timeout(running, timeout_seconds))
            time.sleep(POLL_SECONDS)


def stop(ranks: Sequence[Rank]) -> None:
    """Kills the ranks that still run. What they started themselves is the namespace's to end."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()


def _failure(ranks: Sequence[Rank]) -> str:
    """Says which rank failed first: the one that spoke first.

    Not the one that ended first: a rank closes its connections on its way out, and a peer that trips
    over them can be gone before it.
    """
    failed = [rank for rank in ranks if rank.process.poll()]
    first = min(failed, key=lambda rank: rank.error.stat().st_mtime_ns)
    code = first.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return (
        f"netlab: rank {first.index} on host {first.host} {how}"
        f" ({len(failed)} of {len(ranks)} ranks failed, others stopped); it said:\n{first.last_words()}"
    )


def _timeout(running: Sequence[Rank], timeout_seconds: float) -> str:
    return (
        f"netlab: ranks {[rank.index for rank in running]} still run after {timeout_seconds:g} s and were"
        f" stopped; rank {running[0].index} said:\n{running[0].last_words()}"
    )
