"""The command line in processes forked from one that has imported torch and the library: seconds less than a start.

A forked process has its own environment, folder and output, and ends as the program ends, `os._exit` included. Several
are given what torchrun gives its ranks. What the fork cannot show is how Python starts: tests of that start it.
"""

import atexit
import gc
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

import armillary
from armillary.cli.main import main
from brief import Measured, learn, measure_briefly, measured

LONGEST_SECONDS = 90.0
OURS = Path(armillary.__file__).parent
PRELOADED = (
    "torch", "torch.distributed", "torch.distributed.pipelining", "matplotlib.backends.backend_agg",
    *(".".join(path.relative_to(OURS.parent).with_suffix("").parts) for path in sorted(OURS.rglob("[a-z]*.py"))),
)  # fmt: skip
NUMBERED = range(10_000, 31_997)
MOST_HELD = 100
MEASURED = "measured"  # the file that tells what a job measured
FEW_COLLECTIONS = 20_000, 10, 10  # Python's own would take a twelfth of a process's seconds
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_asked = count()
_held: deque[socket.socket] = deque()


class Ended(NamedTuple):
    """How a program ended: its exit code (minus a signal's number), what it wrote, what it told its launcher."""

    code: int
    out: str
    err: str
    reason: str = ""


def begin(known: Measured | None = None, told: Path | None = None) -> None:
    """What a process of tests begins with: one torch thread, a brief measurement, few collections of garbage."""
    torch.set_num_threads(1)
    measure_briefly(known, told)
    collect_seldom()


def collect_seldom() -> None:
    """What was imported is nobody's garbage, and need not be gone through again and again."""
    gc.freeze()
    gc.set_threshold(*FEW_COLLECTIONS)


def forkserver() -> Any:
    """The context whose processes are forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def free_port() -> int:
    """One that is asked for by number only. It stays bound here, without a listener: so no outgoing connection is given
    it before rank 0 listens, which may share it. Test processes begin a thousand apart."""
    for _ in NUMBERED:
        port = NUMBERED[(1000 * os.getpid() + next(_asked)) % len(NUMBERED)]
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        _held.append(held)
        if len(_held) > MOST_HELD:
            _held.popleft().close()  # its job has begun
        return port
    raise RuntimeError(f"no port of {NUMBERED} is free")


def command(arguments: Sequence[object], folder: Path, ranks: int = 0, **environment: str) -> list[Ended]:
    """Runs `armillary *arguments` in `folder`: once, or as each of the `ranks` ranks of a job; `environment` is added
    to what tests have."""
    context, port = forkserver(), free_port()
    with tempfile.TemporaryDirectory() as kept:
        programs = []
        for rank in range(max(ranks, 1)):
            variables = {**(_as_torchrun(rank, ranks, port, kept) if ranks else {}), **environment}
            order = (tuple(map(str, arguments)), str(folder), variables, f"{kept}/{rank}", measured)
            programs.append(context.Process(target=_run, args=order, daemon=False))
        for program in programs:
            program.start()
        until = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < until and any(program.is_alive() for program in programs):
            wait([program.sentinel for program in programs if program.is_alive()], timeout=1.0)
            if any(program.exitcode for program in programs):  # a launcher would end the others now
                break
        late = [rank for rank, program in enumerate(programs) if program.is_alive() and time.monotonic() > until]
        for program in programs:
            program.kill()
            program.join()
        ended = [
            Ended(program.exitcode, *(_text(f"{kept}/{rank}.{kind}") for kind in ("out", "err", "json")))
            for rank, program in enumerate(programs)
        ]
        learn(Path(kept) / MEASURED)
    assert not late, f"ranks {late} of {list(arguments)} did not end in {LONGEST_SECONDS} s: {ended}"
    return ended


class Job:
    """A user's script, `program(rank, ranks, *args)`, as each rank of a job that nobody ends before its time."""

    def __init__(self, ranks: int, program: Callable[..., object], *args: object) -> None:
        context, port = forkserver(), free_port()
        self.kept = tempfile.TemporaryDirectory()
        self.programs = [
            context.Process(
                target=_run_script,
                args=(_as_torchrun(rank, ranks, port, self.kept.name), f"{self.kept.name}/{rank}", measured),
                kwargs={"program": partial(program, rank, ranks, *args)},
            )
            for rank in range(ranks)
        ]
        for one in self.programs:
            one.start()

    def ended(self, stopped: Sequence[int] = ()) -> list[Ended]:
        """How each ended. stopped: ranks that will not."""
        until, late = time.monotonic() + LONGEST_SECONDS, []
        for rank, one in enumerate(self.programs):
            if rank not in stopped:
                one.join(max(0.0, until - time.monotonic()))
                late += [rank] * one.is_alive()
        for one in self.programs:
            one.kill()
            one.join()
        found = [
            Ended(one.exitcode, *(_text(f"{self.kept.name}/{rank}.{kind}") for kind in ("out", "err")))
            for rank, one in enumerate(self.programs)
        ]
        learn(Path(self.kept.name) / MEASURED)
        self.kept.cleanup()
        assert not late, f"ranks {late} did not end in {LONGEST_SECONDS} s: {found}"
        return found


def _run_script(variables: Mapping[str, str], output: str, known: Measured, program: Callable[[], object]) -> None:
    """As Python runs a script: what it raises goes to sys.excepthook, then comes what is to be done at exit."""
    _redirect(output)
    os.environ.update(variables)
    begin(known, Path(output).with_name(MEASURED))
    try:
        program()
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def _redirect(output: str) -> None:
    for number, suffix in ((1, "out"), (2, "err")):
        with open(f"{output}.{suffix}", "w") as file:
            os.dup2(file.fileno(), number)


def _text(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def _as_torchrun(rank: int, ranks: int, port: int, kept: str) -> dict[str, str]:
    values = (rank, ranks, rank, ranks, "127.0.0.1", port)
    return {
        **dict(zip(LAUNCHED, map(str, values), strict=True)),
        "TORCHELASTIC_ERROR_FILE": f"{kept}/{rank}.json",
        "OMP_NUM_THREADS": "1",
    }


def _run(arguments: tuple[str, ...], folder: str, variables: Mapping[str, str], output: str, known: Measured) -> None:
    _redirect(output)
    os.chdir(folder)
    os.environ.update(variables)
    sys.argv = ["armillary", *arguments]
    begin(known, Path(output).with_name(MEASURED))
    try:
        main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
