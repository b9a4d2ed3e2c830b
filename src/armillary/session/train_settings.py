"""Settings of a training run, what a resumed run goes on with, and the memory that its process takes.

A resumed run keeps plan and profile of its folder, unless another plan is asked for. To profile and price again takes
time, and could come out differently on a busier machine. On the same hosts with the same torch it keeps the measured
links too.

Held-out batches that are looked at while training are a random sample (`validation_batches`: Vitter, 1985, algorithm
R), since the first ones may be unlike the rest.
"""

import random
import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from armillary.plans.parcel import RankInfo
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.registry import Choice
from armillary.session.plan_cache import CacheKey, cached_links, hosts_of
from armillary.session.plan_job import JobRequest, open_transport
from armillary.session.run_folder import CHECKPOINTS, kept_decision
from armillary.session.workload import Batch
from armillary.stages.optimizer_step import Options, options_of
from armillary.tables.optimizer_state import plain
from armillary.transport.agreement import by_rank_zero

__all__ = [
    "AMONG",
    "PROGRESS_STEPS",
    "VALIDATION_BATCHES",
    "WATCHED_STEP",
    "Settings",
    "apply_new_options",
    "group_options",
    "reset_peak_memory",
    "resident_bytes",
    "resume_plan",
    "validation_batches",
    "validation_interval",
]

AMONG = 256  # batches drawn at most, so that an endless or a slow stream costs little


def validation_batches(batches: Iterable[Batch], count: int, seed: int) -> list[Batch]:
    """`count` of the first AMONG batches, each as likely as any other; all of them if there are no more.
    The same batches and seed give the same sample."""
    stream = random.Random(seed)
    chosen: list[Batch] = []
    for number, batch in enumerate(islice(batches, AMONG)):
        place = number if number < count else stream.randrange(number + 1)
        if place < len(chosen):
            chosen[place] = batch
        elif place < count:
            chosen.append(batch)
    return chosen


def group_options(optimizer: Optimizer) -> Options:
    """As they are now, fit for a checkpoint."""
    return [{name: plain(value) for name, value in group.items()} for group in options_of(optimizer)]


def apply_new_options(
    optimizer: Optimizer, begun: Sequence[Mapping[str, Any]], asked: Sequence[Mapping[str, Any]]
) -> str:
    """Puts what is asked otherwise than the run began with in the place of what was loaded; says what. A number that a
    scheduler has moved since then is moved in proportion."""
    said: dict[str, None] = {}
    for group, was, wanted in zip(optimizer.param_groups, begun, asked, strict=True):
        for name, value in wanted.items():
            if name not in was or value == was[name]:
                continue
            loaded = group[name]
            is_moved = isinstance(loaded, float) and bool(was[name]) and loaded != was[name]
            group[name] = value * loaded / was[name] if is_moved else value
            said[f"{name} is {_text(group[name])} as asked now, no longer {_text(loaded)}"] = None
    return ", ".join(said)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


PROGRESS_STEPS = 10
WATCHED_STEP = 5  # under a plan, or its last: late enough that all state is there and prefetch is under way
VALIDATIONS = 10  # short evaluations during a run, of this many batches per rank
VALIDATION_BATCHES = 2


def validation_interval(steps: int) -> int:
    """From one short evaluation to the next; one more follows the last step."""
    return max(PROGRESS_STEPS, steps // VALIDATIONS)


@dataclass(frozen=True)
class Settings:
    """How long to train and what to keep.

    Args of note:
        folder: of this run; rank 0 must be able to write it.
        every_steps, every_seconds: between checkpoints, whichever comes first; 0 is never. One more ends the run.
        keep: so many checkpoints.
        asks_options: whether options of the workload were named: those of its optimizer then win over saved ones.
    """

    folder: Path
    steps: int
    seed: int = 0
    every_steps: int = 0
    every_seconds: float = 60.0
    keep: int = 2
    resume: bool = False
    request: JobRequest = field(default_factory=JobRequest)
    asks_options: bool = False

    def __post_init__(self) -> None:
        intervals = (self.every_steps, self.every_seconds)
        if self.steps < 1 or self.keep < 1 or min(intervals) < 0:
            raise ValueError(f"train: want steps >= 1, keep >= 1 and no negative interval, got {self}")

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS


def resume_plan(settings: Settings, wanted: CacheKey) -> Settings:
    """Collective. The settings with plan and profile of the run that is gone on with, and its links if they are these;
    the settings themselves where anything is asked of the plan, or the job is of other workers or nodes.

    Args:
        wanted: what links must have been measured for; hosts apart.

    Raises:
        ValueError: the plan does not fit this job, and one made anew would train by another rule. On every rank.
    """
    if not settings.resume or settings.request != JobRequest():
        return settings
    transport = open_transport()
    kept = by_rank_zero(transport, lambda: kept_decision(settings.folder))
    place, here = transport.place, replace(wanted, hosts=hosts_of(transport))
    links = by_rank_zero(transport, lambda: cached_links(settings.folder, here)) if kept else None
    transport.close()
    if not kept:
        return settings
    plan, profile = Plan.from_json(kept["plan"]), Profile.from_json(kept["profile"])
    if (plan.workers, plan.workers_per_node) != (place.workers, place.workers_per_node):
        _refuse_another_rule(plan, place, settings.request.schedule)
        return settings
    return replace(settings, request=JobRequest(plan=plan, profile=profile, topology=links))


def _refuse_another_rule(plan: Plan, place: RankInfo, asked: Choice) -> None:
    """A schedule may clip or read old weights, and codes change what is learned: nobody leaves either by chance."""
    rules = [] if plan.schedule == asked else [f"schedule {plan.schedule}"]
    rules += [note for note in plan.notes if note.startswith("NOT exact")]
    if not rules:
        return
    raise ValueError(
        f"resume: the run trained on {plan.workers} workers, {plan.workers_per_node} a node, by a rule of its own "
        f"({'; '.join(rules)}), and its plan does not fit this job of {place.workers}, {place.workers_per_node} a "
        "node; say how it shall go on: --schedule and --exchange as before, or others, or --plan FILE with a plan for "
        "this job (armillary plan --out FILE)"
    )


def resident_bytes() -> tuple[int, int]:
    """(now, peak) bytes of this process in memory."""
    status = Path("/proc/self/status")
    if not status.is_file():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak, peak
    found = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    now, peak = (int(found[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def reset_peak_memory() -> None:
    """Makes the peak of `resident_bytes` begin from now, where the system allows it (Linux, proc(5))."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
