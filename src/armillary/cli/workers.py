"""Runs the body of a command where it belongs: here, in workers started here, or as one worker among others.

What needs no worker is looked at first (`prepare`), so that what is wrong with it is said before any is started.
Whatever goes wrong is said once: by the process the user started.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch
import typer

from armillary.cli.launch import EXPECTED, INTERRUPTED, is_worker, keep_failure, launch, text_of, was_refused
from armillary.cli.refusal import FAILED, USAGE, Refused
from armillary.runtime.process_group import start_process_group, stop_process_group

__all__ = ["DEFAULT_WORKERS", "count_of", "rank", "run_in_workers"]

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
