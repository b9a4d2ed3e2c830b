"""Starts the workers of a command on this machine, by torch's elastic launcher, and reports how they ended.

The workers run the very command line the user typed. That they are workers they see by RANK in their environment, as
they do under an outer torchrun, where nothing is launched here. What needs no worker is looked at first (`prepare`), so
that what is wrong with it is said before any is started. Of several failing workers the one that failed first is shown,
once; Ctrl-C stops them all with one message.

This is the one file that imports torch.distributed.launcher.
"""

import json
import logging
import os
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import typer
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from armillary.cli.names import FAILED, USAGE, Refused
from armillary.transport.groups import start_process_group, stop_process_group

__all__ = [
    "DEFAULT_WORKERS",
    "EXPECTED",
    "INTERRUPTED",
    "Failure",
    "count_of",
    "first_failure",
    "is_worker",
    "keep_failure",
    "launch",
    "rank",
    "run_in_workers",
    "text_of",
    "was_refused",
]

INTERRUPTED = 130
# Ctrl-C reaches the launcher alone, which passes it on: a worker then ends at once and says nothing.
WORKER = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); from armillary.cli.main import main; main()"
EXPECTED = (Refused, NotImplementedError, ValueError, FloatingPointError, IndexError, TypeError, OSError)
SHUTDOWN_SECONDS = 5


@dataclass(frozen=True)
class Failure:
    """Why a worker ended. seconds: when, since the epoch. code: its exit code, as far as the launcher knows it.
    is_killed: by a signal, and not by the launcher."""

    rank: int
    seconds: float
    text: str
    code: int = 1
    is_killed: bool = False


def is_worker() -> bool:
    """Whether somebody (this file, torchrun) launched this process as one of several."""
    return "RANK" in os.environ


def launch(arguments: Sequence[str], workers: int) -> Failure | None:
    """Runs `armillary *arguments` in `workers` processes until all have ended; the first failure, if any.

    Raises:
        KeyboardInterrupt: Ctrl-C; every worker is gone.
    """
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what went wrong is said once, below
    with tempfile.TemporaryDirectory(prefix="armillary_") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        try:
            elastic_launch(config, sys.executable)("-c", WORKER, *arguments)
        except SignalException:
            raise KeyboardInterrupt from None
        except ChildFailedError as error:
            return first_failure(Path(logs), {rank: one.exitcode for rank, one in error.failures.items()})
        except json.JSONDecodeError:  # torch's launcher reads what workers wrote down, and gives up on half a file
            return first_failure(Path(logs), {})
    return None


def keep_failure(text: str, rank: int) -> None:
    """Writes why this worker ends where the launcher looks for it (TORCHELASTIC_ERROR_FILE), in torch's own format.

    Whole or not at all: the launcher ends the other workers as they write, and would stumble over half a message.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time())), "seconds": time.time()}
    message = {"message": text, "extraInfo": extra, "rank": rank}
    draft = Path(f"{path}.draft")
    draft.write_text(json.dumps({"message": message}))
    os.replace(draft, path)


def text_of(error: BaseException) -> str:
    """What the user needs: our refusals speak for themselves; others come with the way that led to them."""
    if was_refused(error):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def was_refused(error: BaseException) -> bool:
    """Whether it is a refusal of ours: raised in this package, for a reason that its text says."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    return isinstance(error, EXPECTED) and bool(frames) and frames[-1].filename.startswith(ours)


def first_failure(logs: Path, exit_codes: dict[int, int]) -> Failure:
    """The earliest error any worker wrote down; a worker killed by a signal left none, and comes first. A worker that
    the launcher ended has no code of its own to end with: another's is taken.

    Args:
        logs: below which each worker has a folder of its rank's name, with error.json if it said why it ended.
        exit_codes: rank -> of those that failed, as far as the launcher knows them.
    """
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and -code not in (2, 15)}
    for rank, signal in sorted(killed.items()):
        reason = "; the machine may be out of memory" if signal == 9 else ""
        return Failure(rank, 0.0, f"ended by signal {signal}{reason}", is_killed=True)
    found, torn, own_code = [], [], max([1, *exit_codes.values()])
    for path in sorted(logs.rglob("error.json")):
        try:
            message = json.loads(path.read_text())["message"]
            rank, seconds = message["rank"], message["extraInfo"]["seconds"]
            code = exit_codes.get(rank, 0)
            found.append(Failure(rank, seconds, message["message"], code if code > 0 else own_code))
        except (ValueError, KeyError, TypeError):  # not of ours, or of a worker that was ended as it wrote
            torn.append(Failure(int(path.parent.name), path.stat().st_mtime, "ended; the message it left is not whole"))
    by_themselves_first = sorted(exit_codes.items(), key=lambda one: one[1] < 0)
    silent = [Failure(rank, 0.0, f"ended with exit code {code} and no message") for rank, code in by_themselves_first]
    return min(found or torn or silent, key=lambda failure: failure.seconds)


DEFAULT_WORKERS = 2

Prepared = TypeVar("Prepared")


def count_of(workers: int | None) -> int:
    """The workers of the job: those of the torchrun that started this one, or those that were asked for."""
    if is_worker():
        return int(os.environ["WORLD_SIZE"])
    return DEFAULT_WORKERS if workers is None else workers


def run_in_workers(
    workers: int | None,
    prepare: Callable[[], Prepared],
    body: Callable[[Prepared], int],
    more_arguments: Callable[[Prepared], Sequence[str]] = lambda _: (),
    how_to_go_on: Callable[[], str] = lambda: "",
) -> NoReturn:
    """Runs `body` on every worker, on what `prepare` made there, and ends the process with its exit code.

    Args:
        workers: how many; None for as many as torchrun started, or DEFAULT_WORKERS.
        prepare: also runs in the process that launches, before any worker is; a refusal of ours ends it with USAGE.
        more_arguments: what the launched command line gets besides the user's own.
        how_to_go_on: what to tell a user who pressed Ctrl-C, or one of whose workers was killed, besides that.
    """
    try:
        code = _run(workers, prepare, body, more_arguments, how_to_go_on)
    except KeyboardInterrupt:
        typer.echo(f"\nstopped; all workers are gone. {how_to_go_on()}".rstrip(), err=True)
        code = INTERRUPTED
    except Exception as error:
        _fail(error)
    sys.stdout.flush()
    raise typer.Exit(code)


def _run(
    workers: int | None,
    prepare: Callable[[], Prepared],
    body: Callable[[Prepared], int],
    more_arguments: Callable[[Prepared], Sequence[str]],
    how_to_go_on: Callable[[], str],
) -> int:
    count = count_of(workers)
    if is_worker():
        _refuse_other_count(workers)
        _share_cores()
        start_process_group()
    elif count > 1:
        return _launched([*sys.argv[1:], *more_arguments(_prepared(prepare))], count, how_to_go_on)
    code = body(_prepared(prepare))
    stop_process_group()
    if code and is_worker():
        keep_failure("", rank())  # its body has said what there is to say
    return code


def _prepared(prepare: Callable[[], Prepared]) -> Prepared:
    try:
        return prepare()
    except EXPECTED as error:
        if was_refused(error):
            raise Refused(str(error)) from error
        raise


def _launched(arguments: Sequence[str], count: int, how_to_go_on: Callable[[], str]) -> int:
    failure = launch(arguments, count)
    if failure is None:
        return 0
    if failure.text:
        typer.echo(f"error: {_with_rank(failure.text, failure.rank)}", err=True)
    if failure.is_killed and (said := how_to_go_on()):
        typer.echo(said, err=True)
    return FAILED if failure.text else failure.code


def _with_rank(text: str, rank: int) -> str:
    return text if text.startswith("rank ") else f"rank {rank}: {text}"


def _fail(error: Exception) -> NoReturn:
    code = USAGE if isinstance(error, Refused) else FAILED
    if not is_worker():
        typer.echo(f"error: {text_of(error)}", err=True)
        raise typer.Exit(code)
    keep_failure(text_of(error), rank())
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        typer.echo(f"error: {_with_rank(text_of(error), rank())}", err=True)
    # Threads of a half-finished exchange may be alive: a proper exit could wait for peers that wait for this rank.
    sys.stdout.flush()
    os._exit(code)


def _refuse_other_count(workers: int | None) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if workers is not None and workers != started:
        raise Refused(f"--workers {workers}, but this job has {started}; drop --workers under torchrun")


def _share_cores() -> None:
    """Workers of one machine divide its cores among them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))
