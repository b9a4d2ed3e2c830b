"""Runs the body of a command where it belongs: here, in workers started here, or as one worker among others.

Whatever goes wrong is said once: by the process the user started.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import typer

from armillary.cli.launch import INTERRUPTED, is_worker, keep_failure, launch, text_of
from armillary.runtime.process_group import start_process_group, stop_process_group

__all__ = ["DEFAULT_WORKERS", "rank", "run_in_workers"]

DEFAULT_WORKERS = 2


def run_in_workers(
    workers: int | None,
    body: Callable[[], int],
    more_arguments: Callable[[], Sequence[str]] = list,
    on_interrupt: Callable[[], str] = lambda: "",
) -> NoReturn:
    """Runs `body` on every worker and ends the process with its exit code.

    Args:
        workers: how many; None for as many as torchrun started, or DEFAULT_WORKERS.
        more_arguments: what the launched command line gets besides the user's own; called before launching.
        on_interrupt: what to tell a user who pressed Ctrl-C, besides that all workers are gone.
    """
    try:
        code = _run(workers, body, more_arguments)
    except KeyboardInterrupt:
        typer.echo(f"\nstopped; all workers are gone. {on_interrupt()}".rstrip(), err=True)
        code = INTERRUPTED
    except Exception as error:
        _fail(error)
    sys.stdout.flush()
    raise typer.Exit(code)


def _run(workers: int | None, body: Callable[[], int], more_arguments: Callable[[], Sequence[str]]) -> int:
    if is_worker():
        _refuse_other_count(workers)
        _share_cores()
        start_process_group()
        code = body()
        stop_process_group()
        if code:
            keep_failure("", rank())  # its body has said what there is to say
        return code
    count = DEFAULT_WORKERS if workers is None else workers
    if count < 1:
        raise ValueError(f"--workers: want at least 1, got {count}")
    if count == 1:
        code = body()
        stop_process_group()
        return code
    failure = launch([*sys.argv[1:], *more_arguments()], count)
    if failure is None:
        return 0
    if failure.text:
        typer.echo(f"error: {_with_rank(failure.text, failure.rank)}", err=True)
    return 1


def _with_rank(text: str, rank: int) -> str:
    return text if text.startswith("rank ") else f"rank {rank}: {text}"


def _fail(error: Exception) -> NoReturn:
    if not is_worker():
        typer.echo(f"error: {text_of(error)}", err=True)
        raise typer.Exit(1)
    keep_failure(text_of(error), rank())
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        typer.echo(f"error: {_with_rank(text_of(error), rank())}", err=True)
    # Threads of a half-finished exchange may be alive: a proper exit could wait for peers that wait for this rank.
    sys.stdout.flush()
    os._exit(1)


def _refuse_other_count(workers: int | None) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if workers is not None and workers != started:
        raise ValueError(f"--workers {workers}, but this job has {started}; drop --workers under torchrun")


def _share_cores() -> None:
    """Workers of one machine divide its cores among them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def rank() -> int:
    return int(os.environ.get("RANK", "0"))
