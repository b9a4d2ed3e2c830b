"""The options of a schedule that commands share, and the choice they make together."""

from dataclasses import replace
from typing import Annotated, NamedTuple

import typer

from armillary.cli.launch import is_worker
from armillary.cli.workers import DEFAULT_WORKERS
from armillary.facts.plan import Choice
from armillary.schedules.chosen import LOOP_OWNERS
from armillary.schedules.remedies.remedy import remedies
from armillary.schedules.shared import devices_for
from armillary.session.decide import Wishes

__all__ = ["Clip", "ClipBy", "Cut", "MicroBatches", "Mode", "Remedies", "Schedule", "Scheduled", "Slack", "Stages"]

DEFAULT_MODE = "ring"
Schedule = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="simultaneous: all workers at once. cyclic: staggered; weights up to one step old, NOT exact. "
        "delayed_all_reduce: at once, while the last step's gradients are under way; weights one step old, NOT exact.",
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        metavar="MODE",
        help="Of cyclic. ring: one worker a process. zero_ring: the same, weights only where they live or are used. "
        "pipeline: one stage a process. shared: N stages on N(N+1)/2 processes for --workers N. one_device: one "
        "process in all, --workers staggered micro-batches in it; with --micro-batches too, so many in each of "
        "--workers processes. (default: ring)",
    ),
]
Slack = Annotated[
    int,
    typer.Option(
        help="Of cyclic: 0 reads weights as early as they exist, more waits longer (in workers' delays; in a pipeline, "
        "in micro-batches); as many as there are micro-batches: all one step old."
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(help="Of cyclic: parts the model is cut into. (default: one a worker)", show_default=False),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        help="Of cyclic pipelines and one_device: micro-batches a step, of a process. (default: one a worker)",
        show_default=False,
    ),
]
Cut = Annotated[
    list[str],
    typer.Option(metavar="PATH", help="Of cyclic: module that begins the next stage. (default: by cost) Repeatable."),
]
Remedies = Annotated[
    list[str],
    typer.Option(
        "--remedy", metavar="NAME", help=f"Of cyclic, against old weights: {', '.join(remedies())}. Repeatable."
    ),
]
Clip = Annotated[
    float | None,
    typer.Option(metavar="NORM", help="Clip gradients to this. (default: not clipped)", show_default=False),
]
ClipBy = Annotated[
    str,
    typer.Option(
        metavar="WHICH",
        help="Of --clip, cyclic. global: the norm over all stages, exact; needs slack. stage: each stage by its own. "
        "previous: the norm of the step before. stage and previous are NOT exact. (default: global)",
    ),
]


class Scheduled(NamedTuple):
    """What was asked of the schedule."""

    name: str
    mode: str
    slack: int
    stages: int | None
    micro_batches: int | None
    cut: list[str]
    remedies: list[str]
    clip: float | None = None
    clip_by: str = ""

    def processes(self, workers: int | None) -> int | None:
        """How many processes to start where the user asked for `workers`; under torchrun, None for what there is."""
        if self.name == "cyclic" and self.mode == "shared":
            if workers is None and is_worker():
                return None
            count = DEFAULT_WORKERS if workers is None else workers
            return devices_for(count) if count > 0 else count
        if self.name != "cyclic" or self.mode != "one_device":
            return workers
        return workers or 1 if self.micro_batches else 1

    def announced(self, workers: int | None) -> int | None:
        """`processes`; tells a user for whom they are more than workers."""
        count = self.processes(workers)
        if self.name == "cyclic" and self.mode == "shared" and (count or 0) > 0 and not is_worker():
            asked = DEFAULT_WORKERS if workers is None else workers
            typer.echo(f"mode shared: {asked} workers share {count} processes, one a device (N(N+1)/2)", err=True)
        return count

    def added_to(self, wishes: Wishes, workers: int | None) -> Wishes:
        """
        Raises:
            ValueError: an option that has no meaning with the others.
        """
        if self.name not in ("simultaneous", *LOOP_OWNERS):
            raise ValueError(f"--schedule: no schedule {self.name!r}; there are simultaneous, {', '.join(LOOP_OWNERS)}")
        options = {
            "mode": self.mode, "slack": self.slack, "stages": self.stages, "micro_batches": self.micro_batches,
            "points": self.cut, "remedies": self.remedies, "clip_by": self.clip_by,
        }  # fmt: skip
        given = {key: value for key, value in options.items() if value}
        clipped = {} if self.clip is None else {"clip_norm": self.clip}  # a norm of 0 is refused, not taken for none
        foreign = [*given, *clipped] if self.name == "simultaneous" else list(given)
        if self.name != "cyclic" and foreign:
            raise ValueError(f"--schedule {self.name} has no {', '.join(foreign)}; add --schedule cyclic")
        if self.name == "simultaneous":
            return wishes
        if wishes.plan is not None:
            raise ValueError("--plan is carried out as it is; edit its schedule, or drop --schedule")
        if self.name == "delayed_all_reduce":
            return replace(wishes, schedule=Choice(self.name, clipped))
        given.setdefault("mode", DEFAULT_MODE)
        if given["mode"] == "one_device":
            given.setdefault("micro_batches", workers or DEFAULT_WORKERS)
        return replace(wishes, schedule=Choice("cyclic", {**given, **clipped}))
