"""The folder a run leaves behind: plan, profile, topology, metrics, trace, plot and checkpoints. Rank 0 writes it.

A missing matplotlib costs the plot and no run.
"""

import fcntl
import glob
import itertools
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.trace import Trace

if TYPE_CHECKING:
    from armillary.session.events import Ended, Evaluated, PlannedJob, Progress
    from armillary.session.workload import Workload

__all__ = [
    "CHECKPOINTS",
    "beside_plan",
    "can_draw",
    "claim_folder",
    "forget_after",
    "give_back",
    "keep_decision",
    "keep_end",
    "keep_others_out",
    "kept_decision",
    "note",
    "open_folder",
    "refuse_not_ended",
    "refuse_unwritable",
    "run_folder",
    "write_plan",
]


def can_draw(picture: Path) -> bool:
    """Where it cannot be drawn, a warning says what to install."""
    if find_spec("matplotlib") is not None:
        return True
    warnings.warn(f"{picture} is not drawn: matplotlib is not installed; pip install 'armillary[plot]'", stacklevel=3)
    return False


CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
LEFT = ("plan", "trace", "summary", "profile", "topology")  # by a run that ended, what it is compared by


def refuse_unwritable(folder: Path) -> None:
    """What can be told without leaving a trace, before workers are started.

    Raises:
        ValueError: the folder cannot be made or written.
    """
    above = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not above.is_dir():
        raise ValueError(f"run: cannot write to {folder}: {above.name} is no folder; pass another --runs (or --out)")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"run: cannot write to {folder}: {above} is read-only; pass another --runs (or --out)")


def open_folder(folder: Path) -> None:
    """Makes the folder and sees that it can be written, before any time is spent on training.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()  # with no name: ranks may open one folder at once
    except OSError as error:
        raise _unwritable(folder, error) from None


def keep_others_out(folder: Path, held: ExitStack) -> None:
    """Until `held` is closed, or this process ends, no other run may begin here: two would mix their checkpoints.

    A file system without locks keeps nobody out.

    Raises:
        ValueError: another run is at work there.
    """
    opened = os.open(folder, os.O_RDONLY)
    held.callback(os.close, opened)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"run: another run is at work in {folder}; wait until it has ended, end it, or pass another --name"
        ) from None
    except OSError:
        return


def _unwritable(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"run: cannot write to {folder} ({error}); pass a --runs (or --out) that can be written")


def claim_folder(runs: Path, stem: str) -> Path:
    """Makes the first of runs/stem, runs/stem-2 and so on that does not exist: no other run will take it.

    Raises:
        ValueError: it cannot be made.
    """
    return next(folder for folder in _numbered(runs, stem) if _is_made(folder))


def _is_made(folder: Path) -> bool:
    """Whether this call made it: of several at once one does."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise _unwritable(folder, error) from None
    return True


def give_back(folder: Path) -> None:
    """What a run that failed before it began had claimed."""
    with suppress(OSError):  # it is not empty, once a run has begun
        folder.rmdir()


def _numbered(runs: Path, stem: str) -> Iterator[Path]:
    return (runs / (stem if number == 1 else f"{stem}-{number}") for number in itertools.count(1))


def refuse_not_ended(folder: Path) -> None:
    """
    Raises:
        ValueError: a file is missing that a run which ended leaves.
    """
    for noun in LEFT:
        if not (path := folder / f"{noun}.json").is_file():
            raise ValueError(
                f"compare: {folder} has no {path.name}; give the folder of a run that ended, as `armillary train` "
                "leaves it; a script leaves one by run.report(folder)"
            )


def run_folder(runs: Path, stem: str, name: str, is_resumed: bool) -> Path:
    """The folder of a run: runs/name if it has a name; else the first of runs/stem, runs/stem-2 and so on that does
    not exist, or when it is resumed the youngest that does.

    Raises:
        ValueError: a new run would write into an old one, or there is nothing to resume.
    """
    if not is_resumed:
        folder = runs / name if name else next(one for one in _numbered(runs, stem) if not one.exists())
        if (folder / METRICS).exists():
            raise ValueError(f"run: {folder} already holds a run; pass --resume to go on with it, or another --name")
        return folder
    places = [runs / name] if name else [one for one in runs.glob(f"{glob.escape(stem)}*") if _is_of(one, stem)]
    found = [place for place in places if place.is_dir()]
    if not found:
        raise ValueError(f"run: nothing to resume: no folder {name or stem} under {runs}; drop --resume")
    return max(found, key=lambda folder: folder.stat().st_mtime_ns)


def _is_of(folder: Path, stem: str) -> bool:
    return folder.name == stem or folder.name.removeprefix(f"{stem}-").isdigit()


def keep_decision(folder: Path, decided: "PlannedJob") -> None:
    decided.profile.save(folder / "profile.json")
    decided.topology.save(folder / "topology.json")
    decided.plan.save(folder / "plan.json")


def beside_plan(plan_file: Path, noun: str) -> Path:
    """Where the profile or topology stands that a plan in a file of its own was made from, as plan.profile.json."""
    return plan_file.with_suffix(f".{noun}.json")


def write_plan(plan_file: Path, decided: "PlannedJob") -> tuple[Path, ...]:
    """The files: the plan's, and beside it what it was made from, under names that no other plan's facts have."""
    open_folder(plan_file.parent)
    profile_file, topology_file = (beside_plan(plan_file, noun) for noun in ("profile", "topology"))
    decided.plan.save(plan_file)
    decided.profile.save(profile_file)
    decided.topology.save(topology_file)
    return plan_file, profile_file, topology_file


def kept_decision(folder: Path) -> dict[str, str]:
    """The plan and the profile in a run's folder, as JSON; empty if it holds no such pair."""
    try:
        kept = {noun: (folder / f"{noun}.json").read_text() for noun in ("plan", "profile")}
        made, seen = Plan.from_json(kept["plan"]), Profile.from_json(kept["profile"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return kept if made.model_fingerprint == seen.model_fingerprint else {}


def note(folder: Path, event: "Progress | Evaluated") -> None:
    """Adds one line to the metrics."""
    with (folder / METRICS).open("a") as metrics:
        metrics.write(json.dumps({"kind": type(event).__name__.lower(), **asdict(event)}) + "\n")


def forget_after(folder: Path, step: int) -> None:
    """Takes out of the metrics what a run that goes on after this step will tell again, and a line cut short."""
    path, draft = folder / METRICS, folder / f"{METRICS}.draft"
    if path.exists():
        lines = path.read_text().splitlines()
        draft.write_text("".join(f"{line}\n" for line in lines if _is_until(step, line)))
        os.replace(draft, path)


def _is_until(step: int, line: str) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


def _known(pairs: Iterable[Any]) -> dict[str, Any]:
    """JSON has no number for what is not known."""
    return {key: None if value != value else value for key, value in pairs}


def keep_end(folder: Path, ended: "Ended", trace: Trace, workload: "Workload", plan: Plan) -> None:
    """The trace of the last steps of all ranks, the summary with forecast beside measured, and the plot, for which
    matplotlib is imported only now; where there is none, everything but the plot."""
    trace.save(folder / "trace.json")
    (folder / "summary.json").write_text(json.dumps(asdict(ended, dict_factory=_known), indent=2) + "\n")
    if not can_draw(folder / "plot.png"):
        return
    from armillary.session.plots import plot

    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    plot(lines, ended, workload, plan).savefig(folder / "plot.png")
