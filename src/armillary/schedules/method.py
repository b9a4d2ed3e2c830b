"""What a schedule's file says of itself: its table, its options, and all that others must know of it.

A `Method` is the entry of a registry (`registry.py`). Planner, runtime, reference and command line read these fields,
so nobody asks for its name; one more schedule is one more file that fills them in. `ScheduleOptions` are a method's
options with nothing left open.

Three numbers are kept apart: processes (the plan's workers), stages K, and micro-batches M. M counts those of the
table. Processes that carry out one table together are a replica; where there are several side by side, each with data
of its own, a step has M of each, and gradients are averaged over the replicas.

What one stage of a cut model costs and carries, per micro-batch: the profile's facts, joined.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from torch import nn

from armillary.plans.factory_errors import is_theirs, told
from armillary.plans.mesh import DATA, STAGE, Axis, Mesh
from armillary.plans.parameter import Numbers
from armillary.schedules.clipping import Clip, Norm
from armillary.schedules.corrections.correction import Correction, build_correction
from armillary.schedules.edges import Edge, refuse_edges
from armillary.schedules.instructions import Placement, Ranks
from armillary.schedules.lowering import placed
from armillary.schedules.routes import Message
from armillary.schedules.schedule import Schedule

__all__ = [
    "DERIVED",
    "NO_BOUND",
    "OWNED_LOOP",
    "PARAMETER_SERVER",
    "USER_LOOP",
    "Method",
    "Objective",
    "Planned",
    "ScheduleOptions",
    "StageLoad",
    "Traffic",
]

USER_LOOP = "user_loop"  # drivers of steps: hooks behind a loop of the user's own
OWNED_LOOP = "owned_loop"  # the schedule's list of instructions, by `run.step`
PARAMETER_SERVER = "parameter_server"  # pulls from owners and pushes to them, by `run.step`


@dataclass(frozen=True)
class StageLoad:
    """first, last: paths of its modules. flops: of the forward. seconds: forward and backward,
    and the gradients of tables that it keeps whole.

    Args of note:
        weight_bytes: of the trained parameters. count_bytes: of one number per parameter, sent behind gradients.
        cache_bytes: held once, however many micro-batches are under way: what its edges remember of samples.
        output_bytes: what it hands to the next stage. output_numbers: of what of it a codec may write.
    """

    first: str
    last: str
    flops: int
    seconds: float
    weight_bytes: int
    count_bytes: int
    activation_bytes: int
    output_bytes: int
    output_numbers: tuple[Numbers, ...] = ()
    cache_bytes: int = 0


Options = Mapping[str, Any]
Objective = Callable[[nn.Module, Any, Any, Callable[[Any, Any], Any]], Any]
Prepare = Callable[["ScheduleOptions", nn.Module, Callable[[nn.Module, Any], Any], Any], nn.Module]

NO_BOUND = -1
# Said elsewhere in a plan: in its stage table, its mesh, or by default.
DERIVED = ("name", "method", "stages", "points", "recompute", "edges")


@dataclass(frozen=True)
class ScheduleOptions:
    """Options with nothing left open but where to cut.

    Args of note:
        slack: 0 reads weights as early as they exist; as many as there are micro-batches: all one step old.
        points: paths of the modules that begin stage 1, 2 and so on; empty where nobody has said.
        costs: per stage (forward, backward) in any unit, for the clock; equal if empty.
        recompute: stages that keep only their input and run again before their backward.
        clip_norm: that a step's mean gradient keeps at most; None: it is not clipped.
        clip_by: "global" (exact, where the schedule leaves time to know it), "stage" or "previous": see `Clip`.
        corrections: against stale weights, by name, in the order in which they act.
        bucket_bytes: of gradients that travel together, where the model is not cut; 0: the planner's default.
        head, objective: of stages that learn from losses of their own, by name; empty where nobody has said.
        edges: by stage, how what it hands on and gets back is coded; empty where nothing is.
        bound: how many steps ahead of the slowest a worker may begin one, where there is no common clock; None: any.
            `NO_BOUND` of a schedule that has a clock.

    Raises:
        ValueError: an option that the schedule cannot honour; the message says what it wants.
    """

    name: str
    method: "Method" = field(repr=False, compare=False)
    stages: int = 1
    micro_batches: int = 1
    slack: int = 0
    points: tuple[str, ...] = ()
    costs: tuple[tuple[float, float], ...] = ()
    recompute: tuple[int, ...] = ()
    clip_norm: float | None = None
    clip_by: Norm | None = None
    corrections: tuple[str, ...] = ()
    bucket_bytes: int = 0
    head: str = ""
    objective: str = ""
    edges: tuple[Edge, ...] = ()
    bound: int | None = NO_BOUND

    def __post_init__(self) -> None:
        if min(self.stages, self.micro_batches) < 1 or min(self.slack, self.bucket_bytes) < 0:
            raise ValueError(
                f"schedule: {self.name} wants stages >= 1, micro_batches >= 1, slack >= 0 and bucket_bytes >= 0, got "
                f"{self.stages}, {self.micro_batches}, {self.slack} and {self.bucket_bytes}"
            )
        if self.points and len(self.points) != self.stages - 1:
            raise ValueError(
                f"schedule: {self.stages} stages have {self.stages - 1} cuts between them, got points {self.points}"
            )
        if strange := [stage for stage in self.recompute if not 0 <= stage < self.stages]:
            raise ValueError(f"schedule: recompute names stages {strange}; there are {self.stages}, counted from 0")
        if self.clip_by is not None and self.clip_norm is None:
            raise ValueError(f"schedule: clip_by={self.clip_by} wants a clip_norm to clip at")
        self.method.check(self)
        if self.edges:
            schedule = self.schedule()
            where = placed(schedule, self.ranks(range(schedule.workers)))
            ranks = [where.ranks(stage) for stage in range(schedule.stages)]
            refuse_edges(self.edges, schedule, ranks, self.method.no_edges)
        if self.clip is not None and self.clip.waits:
            self._refuse_late_norm(self.clip)
        self.built_corrections()

    @property
    def clip(self) -> Clip | None:
        return None if self.clip_norm is None else Clip(self.clip_norm, self.clip_by or "global")

    def built_corrections(self) -> tuple[Correction, ...]:
        """
        Raises:
            ValueError: a name that is no correction's.
        """
        return tuple(map(build_correction, self.corrections))

    def schedule(self) -> Schedule:
        """
        Raises:
            ValueError: the options make no possible table.
        """
        table = self.method.table
        return (told(f"schedule {self.name}", table) if is_theirs(table) else table)(self)

    def ranks(self, together: Sequence[int]) -> Ranks:
        """Who runs what, of processes that carry out one table together."""
        schedule, placement = self.schedule(), self.method.placement
        return together if placement is None else placement(schedule)

    def picture(self) -> str:
        """Who does what when."""
        return self.method.picture(self)

    def replicas(self, workers: int) -> int:
        """How many tables are carried out side by side, each with micro-batches of its own."""
        return workers // self.method.across(self, workers)

    def mesh(self, workers: int) -> Mesh:
        """How the processes are arranged; those of a replica are numbered one after the other."""
        replicas = self.replicas(workers)
        if self.method.axis == DATA or replicas == 1:
            return Mesh((Axis(self.method.axis, workers),))
        return Mesh((Axis(DATA, replicas), Axis(self.method.axis, workers // replicas)))

    def total(self, workers: int) -> int:
        """Micro-batches of a step, those of all processes."""
        return self.micro_batches * self.replicas(workers)

    def handed_in(self, rank: int, workers: int) -> range:
        """Which micro-batches of a step a process hands in; processes that share data hand in the same."""
        mesh = self.mesh(workers)
        each = self.total(workers) // mesh.data_coordinates
        first = mesh.data_coordinate(rank) * each
        return range(first, first + each)

    def as_options(self) -> dict[str, Any]:
        """What a plan writes down of it: what differs from the defaults and stands nowhere else in the plan."""
        written = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in (*DERIVED, *self.method.follows)
            and (
                getattr(self, one.name) != one.default
                or (one.name == "micro_batches" and one.name in self.method.knows)
            )
        }
        if written.get("clip_by") == "global":
            del written["clip_by"]
        return {name: _thawed(value) for name, value in written.items()}

    def _refuse_late_norm(self, clip: Clip) -> None:
        """With the least slack that would do, if any does."""
        try:
            self.method.refuse_late_norm(self.schedule(), clip)
        except ValueError as error:
            for slack in range(self.slack + 1, self.micro_batches + 1) if "slack" in self.method.knows else ():
                try:
                    unclipped = replace(self, clip_norm=None, clip_by=None, slack=slack)
                    self.method.refuse_late_norm(unclipped.schedule(), clip)
                except ValueError:
                    continue
                raise ValueError(f"{error} (slack={slack} is enough)") from None
            raise


class Traffic(NamedTuple):
    """The messages of one stage in `steps` steps, after which the same come again."""

    steps: int
    messages: list[Message]


@dataclass(frozen=True)
class Planned:
    """What the notes of a schedule are made from.

    Args of note:
        stages: per micro-batch. running: paths of modules that keep running statistics.
        exchange_bytes, exchange_seconds: of the groups that collectives carry, per worker and step.
        forward_seconds, backward_seconds: of the whole model, for one micro-batch.
    """

    options: ScheduleOptions
    schedule: Schedule
    stages: Sequence[StageLoad]
    workers: int
    running: Sequence[str] = ()
    exchange_bytes: float = 0.0
    exchange_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0


def _nothing_implied(given: Options, workers: int) -> Options:
    return {}


def _no_complaint(options: ScheduleOptions) -> None:
    return None


def _no_norm_to_wait_for(schedule: Schedule, clip: Clip) -> None:
    return None


def _no_messages(options: ScheduleOptions, stage: int) -> Traffic:
    return Traffic(1, [])


def _first_rank(options: ScheduleOptions, stage: int) -> int:
    return 0


def _no_objectives(options: ScheduleOptions) -> Mapping[int, Objective]:
    return {}


def _every_stage(options: ScheduleOptions, stages: Sequence[nn.Module]) -> None:
    return None


def _no_notes(planned: Planned) -> list[str]:
    return []


def _one_or_all(options: ScheduleOptions, workers: int) -> int:
    return 1 if options.method.is_side_by_side else workers


def _pace_of_one(options: ScheduleOptions, stages: Sequence[float]) -> float:
    return sum(stages)


def _all_kept(options: ScheduleOptions, stages: Sequence[StageLoad]) -> int:
    return sum(stage.activation_bytes for stage in stages)


def _copies_held(options: ScheduleOptions, stage: int, workers: int, slots: float) -> float:
    return 2.0 + slots


@dataclass(frozen=True)
class Method:
    """One schedule.

    Args of note:
        table: of the options.
        knows: options that a user may give.
        examples: sets of options for contract tests; "workers" among them.
        axis: what the processes are: data coordinates, each with data of its own, or the stages of one replica.
        step_mode: the driver that takes training steps, by its name on `session.drivers.DRIVERS`. Under all but
            `USER_LOOP` they are taken by `run.step`. is_cut: the model is cut into stages.
        is_side_by_side: every process carries out a whole table of its own, so a step has M micro-batches of each.
        across: (options, processes) -> how many processes carry out one table together.
        placement: which process runs what, where that changes with the step; else each worker of the table is one.
        lends: a stage's weights are kept by its owner only, and lent for each use, where several processes run it.
        is_even: the mean over processes is gloo's own sum, whose order is not the reference's for three or more.
        keeps_own_statistics: every process keeps running statistics (batch norms) of its own.
        sums_ties: stages may share parameters: their gradients are summed over the stages before a step (`ties.py`).
        has_exchanges: gradients of whole parameters are averaged over ranks by exchanges, not by its own messages.
        no_edges: why what stages hand on cannot be coded; empty where it can.
        implied: (options given, processes) -> options that follow from the number of processes.
        defaults: the same, of those that a user may still set.
        check: refuses options that it cannot honour. refuse_late_norm: see `norm_in_time`.
        owner: (options, stage) -> the process that has the stage's optimizer state and newest weights.
        traffic: (options, stage) -> the stage's messages.
        copies: (options, stage, workers, optimizer slots) -> tensors of the stage's size that a worker holds, in the
            mean over workers.
        peak: (options, stages) -> bytes of activations of the fullest worker.
        pace: (options, seconds of forward and backward of each stage) -> seconds of a step without any exchange.
        objectives: of the stages that the table calls uncoupled, what each learns from: (module of the stage, its
            output, batch, loss) -> scalar. It is called where the stage's weights are held; `loss` is that of the whole
            model, (output, batch) -> scalar.
        prepare: (options, model, loss(model, batch), a batch) -> the model with what its stages want besides, such as
            heads. It is asked for the model of a workload, before there is an optimizer; None: models stay as they are.
        refuse_stages: (options, modules of the stages), before the first step.
        notes: what the reader of a plan should know.
        follows: option names that the number of processes fixes, so that a plan need not write them down.
        deals_rows: tables that are read by row lie by row, dealt to all ranks; else they are whole on every rank.
    """

    table: Callable[[ScheduleOptions], Schedule]
    knows: frozenset[str]
    examples: tuple[Options, ...] = ({"workers": 2},)
    axis: str = STAGE
    step_mode: str = OWNED_LOOP
    is_cut: bool = True
    is_side_by_side: bool = False
    across: Callable[[ScheduleOptions, int], int] = _one_or_all
    placement: Callable[[Schedule], Placement] | None = None
    lends: bool = False
    is_even: bool = False
    keeps_own_statistics: bool = False
    has_exchanges: bool = False
    sums_ties: bool = False
    no_edges: str = "every process runs the whole model, so no activation goes to another"
    implied: Callable[[Options, int], Options] = _nothing_implied
    defaults: Callable[[Options, int], Options] = _nothing_implied
    check: Callable[[ScheduleOptions], None] = _no_complaint
    refuse_late_norm: Callable[[Schedule, Clip], None] = _no_norm_to_wait_for
    owner: Callable[[ScheduleOptions, int], int] = _first_rank
    traffic: Callable[[ScheduleOptions, int], Traffic] = _no_messages
    copies: Callable[[ScheduleOptions, int, int, float], float] = _copies_held
    peak: Callable[[ScheduleOptions, Sequence[StageLoad]], int] = _all_kept
    pace: Callable[[ScheduleOptions, Sequence[float]], float] = _pace_of_one
    objectives: Callable[[ScheduleOptions], Mapping[int, Objective]] = _no_objectives
    prepare: Prepare | None = None
    refuse_stages: Callable[[ScheduleOptions, Sequence[nn.Module]], None] = _every_stage
    notes: Callable[[Planned], list[str]] = _no_notes
    draw: Callable[[ScheduleOptions], str] | None = None
    follows: tuple[str, ...] = ()
    deals_rows: bool = False

    @property
    def owns_loop(self) -> bool:
        """Whether training steps are taken by `run.step`."""
        return self.step_mode != USER_LOOP

    def picture(self, options: ScheduleOptions) -> str:
        """Who does what when, as text."""
        return str(self.table(options)) if self.draw is None else self.draw(options)


def _thawed(value: Any) -> Any:
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value
