"""What `armillary twin` does: trains a workload exactly and otherwise, side by side, and shows what that costs."""

import json
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, NoReturn

from rich.live import Live

from armillary.cli.launch import run_in_workers
from armillary.cli.request import AskedMachines, AskedPlan, AskedWorkload
from armillary.cli.resolve import plan_request_of, said_of, workload_of
from armillary.cli.terminal import as_json, console_here, put
from armillary.session.run_folder import open_folder
from armillary.session.twin import HELD_OUT, Trained, trained
from armillary.session.twin_plans import AskedTraining, Both, Losses, planned
from armillary.session.workload import Batch, Workload

__all__ = ["AskedTwin", "twin_asked"]

WORKERS = 4
LINE_SECONDS = 10.0  # between two lines, where lines do not move
KEPT = "twin.json"


class AskedTwin(NamedTuple):
    """What was typed of the two trainings."""

    way: AskedPlan
    machines: AskedMachines
    steps: int
    seeds: int


class _Ready(NamedTuple):
    """What is trained, by what it is judged and how; in words; and the seeds that an earlier command trained."""

    task: Workload
    held_out: Sequence[Batch]
    asked: AskedTraining
    both: Both
    words: str
    done: list[Losses]


class _Kept(NamedTuple):
    """What an earlier command trained: by which exchanges the twin, and the losses of its seeds."""

    exchanges: str
    done: list[Losses]


def twin_asked(subject: AskedWorkload, typed: AskedTwin, out: Path, is_resumed: bool, is_json: bool) -> NoReturn:
    """Trains both, shows and writes what came of it, and ends the process."""

    def prepare() -> _Ready:
        task = workload_of(subject)
        links = typed.machines.topology
        count = typed.machines.workers or (links.workers if typed.machines.topology_file else WORKERS)
        asked = AskedTraining(links.of(count), typed.steps, typed.seeds, plan_request_of(typed.way, count))
        asked.refuse()
        settings = "".join(f" {name}={value}" for name, value in sorted(subject.settings.items()))
        words = f"{subject.name}{' small' if subject.is_small else ''}{settings}: {asked.words()}"
        held_out = list(islice(task.batches("held_out", 0, 1, 0), HELD_OUT))
        if not held_out:
            raise ValueError(f"twin: {task.name} has no held-out batch, by which both are judged; give it one")
        kept = _kept(out / KEPT, words) if is_resumed else None
        both = planned(task, asked)
        if kept is not None and kept.exchanges != both.other.name:
            raise ValueError(
                f"twin: {out / KEPT} holds seeds trained by {kept.exchanges}, for which {both.other.name} was chosen "
                "now; drop --resume, or pass another --out"
            )
        return _Ready(task, held_out, asked, both, words, [] if kept is None else kept.done)

    def body(ready: _Ready) -> int:
        asked, both, losses = ready.asked, ready.both, ready.done[: ready.asked.seeds]
        open_folder(out)
        line = _Line(asked)
        notes = said_of(asked.topology, typed.machines.topology_file)
        with line.live:
            for seed in range(len(losses), asked.seeds):
                losses.append(trained(ready.task, both, asked, seed, ready.held_out, line))
                both.twin(ready.words, asked, losses, notes).save(out)  # a seed at a time, for --resume
        found = both.twin(ready.words, asked, losses, notes)
        files = found.save(out)
        if is_json:
            print(as_json(found.facts()))
        else:
            put(console_here(), (*found.page(), f"written: {', '.join(map(str, files))}"))
        return 0

    run_in_workers(
        1, prepare, body, how_to_go_on=lambda: f"Seeds that are done stand in {out / KEPT}; --resume goes on"
    )


def _kept(path: Path, words: str) -> _Kept:
    """An earlier command's seeds.

    Raises:
        ValueError: there are none, or they are of another training.
    """
    try:
        kept = json.loads(path.read_text())
        was, exchanges = str(kept["subject"]), str(kept["twin"]["name"])
        sent = (kept["departing"] or {}).get("counted_bytes", 0.0)
        sides = [[tuple(map(_number, one)) for one in kept[side]["losses"]] for side in ("exact", "twin")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"twin: nothing to resume in {path} ({error}); drop --resume, or pass another --out") from None
    if was != words:
        raise ValueError(f"twin: {path} is of {was!r}, asked is {words!r}; ask for the same, or drop --resume")
    return _Kept(exchanges, [Losses(exact, other, sent) for exact, other in zip(*sides, strict=True)])


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


class _Line:
    """Says how far both are: a line that moves on a terminal, now and then a line elsewhere; beside stdout."""

    def __init__(self, asked: AskedTraining) -> None:
        self.asked, self.console = asked, console_here(is_aside=True)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.said_seconds = time.monotonic()

    def __call__(self, done: Trained) -> None:
        where = f"seed {done.seed + 1} of {self.asked.seeds}, step {done.steps}/{self.asked.steps}"
        text = f"{where} | held-out loss {done.exact:.4g} exact, {done.other:.4g} twin"
        if self.console.is_terminal:
            self.live.update(text, refresh=True)
        elif time.monotonic() - self.said_seconds >= LINE_SECONDS:
            self.said_seconds = time.monotonic()
            self.console.print(text)
