"""What a schedule's file says of itself: its table, its options, and all that others must know of it.

A `Method` is the entry of a registry (`registry.py`). Planner, runtime, reference and command line read these fields,
so nobody asks for its name; one more schedule is one more file that fills them in. `ScheduleOptions` are a method's
options with nothing left open.

Three numbers are kept apart: processes (the plan's workers), stages K, and micro-batches M. M counts those of the
table. Processes that carry out one table together are a replica; where there are several side by side, each with data
of its own, a step has M of each, and gradients are averaged over the replicas.

What one stage of a cut model costs and carries, per micro-batch: the profile's facts, joined.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import nn

from armillary.plans.mesh import DATA, STAGE, Axis, Mesh
from armillary.plans.profile import Numbers
from armillary.plans.registry import is_theirs, told
from armillary.schedules.clipping import Clip, Norm
from armillary.schedules.corrections.correction import Correction, build_correction
from armillary.schedules.edges import Codes, Edge, codes_of, refuse_edges
from armillary.schedules.instructions import Instruction
from armillary.schedules.lowering import Lowering, placed
from armillary.schedules.rank_list import ChannelRules, Placement, Ranks, Residency, Ties
from armillary.schedules.schedule import Schedule

__all__ = [
    "DERIVED",
    "NO_BOUND",
    "OWNED_LOOP",
    "PARAMETER_SERVER",
    "USER_LOOP",
    "Lists",
    "Method",
    "Objective",
    "Objectives",
    "OptionRules",
    "Placing",
    "Residencies",
    "ScheduleOptions",
    "StageLoad",
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
Lists = Sequence[Sequence[Instruction]]  # of one process, call by call
NO_TIES: Ties = MappingProxyType({})
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
        self.method.options.check(self)
        if self.edges:
            ranks = [self.where.ranks(stage) for stage in range(self.stages)]
            refuse_edges(self.edges, self.schedule(), ranks, self.method.no_edges)
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
        return self._schedule

    @cached_property
    def _schedule(self) -> Schedule:
        table = self.method.table
        return (told(f"schedule {self.name}", table) if is_theirs(table) else table)(self)

    def ranks(self, together: Sequence[int]) -> Ranks:
        """Who runs what, of processes that carry out one table together."""
        placed_by = self.method.placement.of
        return together if placed_by is None else placed_by(self.schedule())

    @cached_property
    def where(self) -> Placement:
        """Who runs what, where the processes of one table are counted from 0."""
        schedule = self.schedule()
        if self.method.replicates_table:
            return placed(schedule, [0] * schedule.workers)
        return placed(schedule, self.ranks(range(schedule.workers)))

    def lists(self, steps: int) -> Mapping[int, Lists]:
        """By process of one table, its instructions, call by call of so many steps."""
        schedule, where = self.schedule(), self.where
        clip = None if self.clip is None else self.clip.over(schedule.stages)
        found = {}
        for rank in sorted({rank for stage in range(schedule.stages) for rank in where.ranks(stage)}):
            lowering = Lowering(schedule, rank, where, clip, wires=self.wires())
            found[rank] = [lowering.next_step() for _ in range(steps)]
        return found

    def wires(
        self, one_queue: bool = True, buffered: Collection[int] = (), ties: Ties = NO_TIES, codes: Codes | None = None
    ) -> ChannelRules:
        """How messages travel under it, and what is written around its actions."""
        found = codes_of(self.edges) if codes is None else codes
        return ChannelRules(
            one_queue,
            found,
            self.method.residency.lends_weights,
            buffered,
            ties,
            self.method.residency.activations(self),
        )

    def picture(self) -> str:
        """Who does what when, as text; empty where the loop is the user's."""
        drawn = (self.method.placement.of or str)(self.schedule())
        return str(drawn) if self.method.owns_loop else ""

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
            if one.name not in (*DERIVED, *self.method.options.follows)
            and (
                getattr(self, one.name) != one.default
                or (one.name == "micro_batches" and one.name in self.method.options.knows)
            )
        }
        if written.get("clip_by") == "global":
            del written["clip_by"]
        return {name: _thawed(value) for name, value in written.items()}

    def _refuse_late_norm(self, clip: Clip) -> None:
        """With the least slack that would do, if any does."""
        try:
            self.where.refuse_late_norm(clip)
        except ValueError as error:
            for slack in range(self.slack + 1, self.micro_batches + 1) if "slack" in self.method.options.knows else ():
                try:
                    unclipped = replace(self, clip_norm=None, clip_by=None, slack=slack)
                    unclipped.where.refuse_late_norm(clip)
                except ValueError:
                    continue
                raise ValueError(f"{error} (slack={slack} is enough)") from None
            raise


def _nothing_implied(given: Options, workers: int) -> Options:
    return {}


def _no_complaint(options: ScheduleOptions) -> None:
    return None


def _no_objectives(options: ScheduleOptions) -> Mapping[int, Objective]:
    return {}


def _every_stage(options: ScheduleOptions, stages: Sequence[nn.Module]) -> None:
    return None


def _no_residency(options: ScheduleOptions) -> Mapping[int, Residency]:
    return {}


def _no_notes(planned: Any) -> list[str]:
    return []


@dataclass(frozen=True)
class OptionRules:
    """Which options a schedule has, and what follows for them.

    Args:
        knows: those that a user may give.
        implied: (options given, processes) -> those that follow from the number of processes.
        defaults: the same, of those that a user may still set.
        follows: names of those that the number of processes fixes, so that a plan need not write them down.
        check: refuses options that the schedule cannot honour.
    """

    knows: frozenset[str] = frozenset()
    implied: Callable[[Options, int], Options] = _nothing_implied
    defaults: Callable[[Options, int], Options] = _nothing_implied
    follows: tuple[str, ...] = ()
    check: Callable[[ScheduleOptions], None] = _no_complaint


@dataclass(frozen=True)
class Placing:
    """Which processes carry out one table.

    Args:
        axis: what they are: data coordinates, each with data of its own, or the stages of one replica.
        parts: stages that each of them runs, where fewer stages than processes make several replicas; 0: all of them
            carry out one table, whatever it is.
        of: who runs what, where that changes with the step; else each worker of the table is a process.
        deals_rows: tables that are read by row lie by row, dealt to all ranks; else they are whole on every rank.
    """

    axis: str = STAGE
    parts: int = 0
    of: Callable[[Schedule], Placement] | None = None
    deals_rows: bool = False


@dataclass(frozen=True)
class Objectives:
    """Of a schedule whose table calls stages uncoupled: what these learn from.

    Args:
        of: by stage, (module of the stage, its output, batch, loss) -> scalar. It is called where the stage's weights
            are held; `loss` is that of the whole model, (output, batch) -> scalar.
        prepare: (options, model, loss(model, batch), a batch) -> the model with what its stages want besides, such as
            heads. It is asked for the model of a workload, before there is an optimizer; None: models stay as they are.
        refuse_stages: (options, modules of the stages), before the first step.
    """

    of: Callable[[ScheduleOptions], Mapping[int, Objective]] = _no_objectives
    prepare: Prepare | None = None
    refuse_stages: Callable[[ScheduleOptions, Sequence[nn.Module]], None] = _every_stage


@dataclass(frozen=True)
class Residencies:
    """What does not just stay where it is.

    Args:
        activations: by stage, what is done with them between forward and backward.
        lends_weights: a stage's weights are kept by its owner only, and lent for each use, where several processes run
            the stage.
    """

    activations: Callable[[ScheduleOptions], Mapping[int, Residency]] = _no_residency
    lends_weights: bool = False


@dataclass(frozen=True)
class Method:
    """One schedule: its table, and what the table cannot say. What it sends and holds, and how long it takes, is
    counted on its lists (`costs.py`).

    Args of note:
        table: of the options.
        examples: sets of options for contract tests; "workers" among them.
        step_mode: the driver that takes training steps, by its name on `session.drivers.DRIVERS`. Under all but
            `USER_LOOP` they are taken by `run.step`.
        is_cut: the model is cut into stages.
        replicates_table: every process carries out a whole table of its own, so a step has M micro-batches of each.
        notes: what the reader of a plan should know, from what was planned (`costs.Planned`).
    """

    table: Callable[[ScheduleOptions], Schedule]
    options: OptionRules = OptionRules()
    examples: tuple[Options, ...] = ({"workers": 2},)
    placement: Placing = Placing()
    step_mode: str = OWNED_LOOP
    is_cut: bool = True
    replicates_table: bool = False
    objectives: Objectives = Objectives()
    residency: Residencies = Residencies()
    notes: Callable[[Any], list[str]] = _no_notes

    @property
    def owns_loop(self) -> bool:
        """Whether training steps are taken by `run.step`."""
        return self.step_mode != USER_LOOP

    @property
    def axis(self) -> str:
        return self.placement.axis

    @property
    def is_spread(self) -> bool:
        """Whether several processes with data of their own run a stage of one table."""
        return self.axis == DATA and not self.replicates_table

    @property
    def is_even(self) -> bool:
        """Whether the mean over processes is the backend's own sum, whose order is not the reference's for three or
        more."""
        return self.replicates_table or not self.is_cut

    @property
    def keeps_own_statistics(self) -> bool:
        """Whether every process keeps running statistics (batch norms) of its own."""
        return self.is_spread or not self.is_cut

    @property
    def has_exchanges(self) -> bool:
        """Whether gradients of whole parameters are averaged over ranks by exchanges, not by its own messages."""
        return self.is_cut and not self.is_spread and self.placement.of is None

    @property
    def no_edges(self) -> str:
        """Why what stages hand on cannot be coded; empty where it can."""
        if self.is_spread and self.is_cut:
            return "weights and gradients go from process to process, activations stay where they are made"
        return "every process runs the whole model, so no activation goes to another" if self.axis == DATA else ""

    def across(self, options: ScheduleOptions, workers: int) -> int:
        """How many of so many processes carry out one table together."""
        if self.replicates_table:
            return 1
        return options.stages // self.placement.parts if self.placement.parts else workers


def _thawed(value: Any) -> Any:
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value
