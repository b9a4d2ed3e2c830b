"""Starts the workers of a command on this machine, by torch's elastic launcher, and reports how they ended.

The workers run the very command line the user typed; that they are workers they see by RANK in their environment, as
they do under an outer torchrun, where nothing is launched here. Of several failing workers the one that failed first is
shown, once; Ctrl-C stops them all with one message.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from armillary.cli.refusal import Refused

__all__ = [
    "EXPECTED", "INTERRUPTED", "Failure", "first_failure", "is_worker", "keep_failure", "launch", "text_of",
    "was_refused",
]  # fmt: skip

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
