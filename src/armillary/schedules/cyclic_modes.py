"""A plan's cyclic schedule: the options a `Choice("cyclic", ...)` may have, what is assumed of the others, the table.

Planner, runtime and reference make the same table of the same options, so the modes mean one thing everywhere. Three
numbers are kept apart: processes (the plan's workers), stages K, and micro-batches M of a step.

one_device: M staggered micro-batches through K stages in a process; several processes do the same side by side, with
    micro-batches of their own, and average gradients.
pipeline: K processes, one a stage; M micro-batches.
ring: N processes, one micro-batch each (M = N); K stages on every one of them.
zero_ring: the same, but a process holds the weights of a stage only where it is home to it or uses it just now.
shared: N(N+1)/2 processes, N stages, M = N micro-batches that go from process to process (`shared.py`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from armillary.schedules.clipping import Clip, Norm
from armillary.schedules.cyclic import cyclic
from armillary.schedules.cyclic_pipeline import cyclic_pipeline
from armillary.schedules.norm_in_time import refuse_in_pipeline, refuse_in_ring, refuse_on_one_device
from armillary.schedules.remedies.remedy import Remedy, build_remedy
from armillary.schedules.schedule import Schedule
from armillary.schedules.shared import Sharing, workers_on

__all__ = ["MODES", "RINGS", "CyclicOptions", "read_options"]

RINGS = ("ring", "zero_ring")  # a micro-batch a process
MODES = ("one_device", "pipeline", *RINGS, "shared")
DEFAULT_MICRO_BATCHES = 2  # of one_device, which no number of processes suggests


@dataclass(frozen=True)
class CyclicOptions:
    """Options with nothing left open but where to cut.

    Args of note:
        slack: 0 reads weights as early as they exist; as many as there are micro-batches: all one step old.
        points: paths of the modules that begin stage 1, 2 and so on; empty where nobody has said.
        costs: per stage (forward, backward) in any unit, for the clock of one_device and rings; equal if empty.
        recompute: stages that keep only their input and run again before their backward (not in a ring).
        clip_norm: that a step's mean gradient keeps at most; None: it is not clipped.
        clip_by: "global" (exact, where the schedule leaves time to know it), "stage" or "previous": see `Clip`.
        remedies: against stale weights, by name, in the order in which they act (not in a ring).

    Raises:
        ValueError: an option that its mode cannot honour; the message says what it wants.
    """

    mode: str
    stages: int
    micro_batches: int
    slack: int = 0
    points: tuple[str, ...] = ()
    costs: tuple[tuple[float, float], ...] = ()
    recompute: tuple[int, ...] = ()
    clip_norm: float | None = None
    clip_by: Norm | None = None
    remedies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"schedule: cyclic has no mode {self.mode!r}; there are {', '.join(MODES)}")
        if min(self.stages, self.micro_batches) < 1 or self.slack < 0:
            raise ValueError(
                f"schedule: cyclic wants stages >= 1, micro_batches >= 1 and slack >= 0, got {self.stages}, "
                f"{self.micro_batches} and {self.slack}"
            )
        if self.points and len(self.points) != self.stages - 1:
            raise ValueError(
                f"schedule: {self.stages} stages have {self.stages - 1} cuts between them, got points {self.points}"
            )
        if self.mode == "pipeline" and self.costs:
            raise ValueError("schedule: costs set the clock of one_device and rings; a pipeline has none, drop them")
        if self.mode == "shared" and (self.costs or not self.stages == self.micro_batches):
            raise ValueError(
                f"schedule: mode shared wants as many equal stages as micro-batches, or a device is "
                f"wanted twice; got {self.stages} stages, {self.micro_batches} micro-batches, costs {self.costs}"
            )
        if self.mode in RINGS and self.recompute:
            raise ValueError("schedule: a ring runs the user's own forward; checkpoint modules there, drop recompute")
        if self.clip_by is not None and self.clip_norm is None:
            raise ValueError(f"schedule: clip_by={self.clip_by} wants a clip_norm to clip at")
        _refuse_late_norm(self)
        if self.mode in (*RINGS, "shared") and self.remedies:
            raise ValueError(
                f"schedule: mode {self.mode} has no {', '.join(self.remedies)}: momentum and gradients are at a "
                f"stage's home only, and workers read weights as they pass; take one_device or pipeline, or drop them"
            )
        self.built_remedies()

    @property
    def clip(self) -> Clip | None:
        return None if self.clip_norm is None else Clip(self.clip_norm, self.clip_by or "global")

    def built_remedies(self) -> tuple[Remedy, ...]:
        """
        Raises:
            ValueError: a name that is no remedy's.
        """
        return tuple(map(build_remedy, self.remedies))

    def schedule(self) -> Schedule:
        """
        Raises:
            ValueError: the options make no possible table.
        """
        if self.mode == "pipeline":
            return cyclic_pipeline(self.stages, self.micro_batches, self.slack)
        return cyclic(self.micro_batches, self.stages, self.slack, self.costs or None)

    def picture(self) -> str:
        """Who does what when."""
        return str(Sharing(self.schedule()) if self.mode == "shared" else self.schedule())

    def as_options(self) -> dict[str, Any]:
        """What a plan writes down: everything but what is empty, with lists for tuples, as JSON has them."""
        return {name: _thawed(value) for name, value in asdict(self).items() if value not in ((), None)}


def read_options(options: Mapping[str, Any], processes: int) -> CyclicOptions:
    """What is not said follows from the mode and the number of processes; lists become tuples, as JSON has none.

    Raises:
        ValueError: no mode, an unknown option, or numbers that do not go together.
    """
    known = [field.name for field in fields(CyclicOptions)]
    strange = sorted(set(options) - set(known))
    if strange or "mode" not in options:
        raise ValueError(f"schedule: cyclic wants mode and may have {', '.join(known[1:])}; got {dict(options)}")
    given = {key: _frozen(value) for key, value in options.items()}
    implied = _implied(given, processes)
    for name, value in implied.items():
        if given.get(name, value) != value:
            raise ValueError(
                f"schedule: mode {given['mode']} on {processes} processes has {name}={value}, got {given[name]}; "
                f"drop {name}, or take another number of processes"
            )
    stages = len(given.get("costs", ())) or len(given.get("points", ())) + 1
    defaults = {
        "one_device": {"micro_batches": DEFAULT_MICRO_BATCHES},
        "pipeline": {"micro_batches": processes},
    }.get(given["mode"], {})
    filled = {**defaults, **implied, **given}
    filled.setdefault("micro_batches", processes)
    if filled.get("clip_norm") is not None:
        filled.setdefault("clip_by", "global")
    filled.setdefault("stages", stages if stages > 1 else filled["micro_batches"])
    return CyclicOptions(**filled)


def _implied(given: Mapping[str, Any], processes: int) -> dict[str, int]:
    """What the number of processes fixes."""
    alone = [name for name in ("clip_norm", "remedies") if given.get(name)]
    if given["mode"] == "one_device" and processes > 1 and alone:
        raise ValueError(
            f"schedule: mode one_device on {processes} processes knows no {' and no '.join(alone)}, for which its "
            f"reference has no words; drop them, or take 1 process or a ring"
        )
    if given["mode"] == "shared":
        workers = workers_on(processes)
        return {"stages": workers, "micro_batches": workers}
    if given["mode"] in RINGS:
        return {"micro_batches": processes}
    return {"stages": processes} if given["mode"] == "pipeline" else {}


def _refuse_late_norm(options: CyclicOptions) -> None:
    """With the least slack that would do, if any does."""
    rings = dict.fromkeys(RINGS, refuse_in_ring)
    refuse = {"pipeline": refuse_in_pipeline, **rings}.get(options.mode, refuse_on_one_device)
    if options.clip is None or not options.clip.waits:
        return
    try:
        refuse(options.schedule(), options.clip)
    except ValueError as error:
        for slack in range(options.slack + 1, options.micro_batches + 1):
            try:
                refuse(replace(options, clip_norm=None, clip_by=None, slack=slack).schedule(), options.clip)
            except ValueError:
                continue
            raise ValueError(f"{error} (slack={slack} is enough)") from None
        raise


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _thawed(value: Any) -> Any:
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value
