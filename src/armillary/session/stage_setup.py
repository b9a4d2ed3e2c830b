"""What an engine of a schedule that owns the loop is made of: stages, loss, replicas, weights that are kept or lent.

The model is cut where the plan says, and the loss taken apart. A process keeps its own stages; parameters of the others
are empty, except in looks at the whole model. Weights that are lent to this process are refused to whatever reads them
out of turn. Ranks that hold the same stages exchange what the plan says.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from armillary.exchanges.exchange import build_dense, dense_exchanges
from armillary.models.split_loss import SplitLoss
from armillary.plans.mesh import DATA
from armillary.plans.parcel import RankInfo
from armillary.plans.plan import Plan
from armillary.profiler.probe import Loss
from armillary.reference.whole_model import CutModel
from armillary.runtime.dense_unit import DenseUnit, dense_unit
from armillary.schedules.edges import codes_of, sample_keys
from armillary.schedules.lowering import placed
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.random_streams import seed_from_step
from armillary.schedules.rank_list import Ranks
from armillary.schedules.registry import options_of
from armillary.session.ema import CodedLeaves, coded_leaves
from armillary.session.job import TrainJob
from armillary.session.workload import Batch
from armillary.stages.partition import Stage, ties_of
from armillary.stages.stages import TracedInput, Whole, refuse_other_groups, refuse_ties, stages_of, whole_stage
from armillary.stages.train_spec import StageReplicas, StepLosses, TrainSpec
from armillary.stages.weights import UnshardedStage
from armillary.transport.groups import data_place
from armillary.transport.point_to_point import CountedChannel
from armillary.transport.transport import Transport

__all__ = [
    "Engine",
    "LentStages",
    "MicroBatch",
    "OwnStages",
    "StageSetup",
    "cut_model",
    "ranks_of",
    "replicas_of",
    "set_up_stages",
    "share_first",
]

MicroBatch = tuple[Any, Batch]  # what the first stage reads of a micro-batch, and what the loss wants


@dataclass(frozen=True, eq=False)
class StageSetup:
    """
    Args of note:
        stages: the model, cut. A schedule that does not cut has it and its loss as one, without a loss it alone.
        input_of: what the first stage reads of a batch.
        coded: what evaluation codes, as training does.
        is_traced: whether stages come from a trace of the model, which fixes the mode of every module.
    """

    plan: Plan
    options: ScheduleOptions
    job: TrainJob
    transport: Transport
    channel: CountedChannel
    stages: Sequence[Stage]
    spec: TrainSpec
    input_of: Callable[[Batch], Any]
    coded: CodedLeaves = ()
    is_traced: bool = False

    @property
    def rank(self) -> int:
        return self.transport.place.rank

    def given(self, batches: Sequence[Batch]) -> list[MicroBatch]:
        return [(self.input_of(batch), batch) for batch in batches]


class Engine(Protocol):
    """Every process makes the same calls. Complete when constructed."""

    def given(self, batches: Sequence[Batch]) -> Sequence[MicroBatch]:
        """Of the micro-batches of this process, for `step`. Refuses what cannot be stepped on; begins nothing."""

    def step(self, given: Sequence[MicroBatch]) -> list[StepLosses]:
        """One training step; the losses known by now."""

    def settle(self) -> list[StepLosses]:
        """Finishes what is under way; training goes on as if nobody had asked."""

    def drain(self) -> list[StepLosses]:
        """Settles, and the next step reads the newest weights everywhere, as the first did."""

    def newest(self) -> AbstractContextManager[None]:
        """When everything is settled. Inside, the whole model holds the newest weights."""

    @property
    def hooks(self) -> ExitStack:
        """Closed, it takes them off; asks nobody."""

    @property
    def teller(self) -> int | None:
        """The process that knows a step's losses; None where each knows those of its own micro-batches."""

    def alike(self) -> Mapping[str, Tensor]:
        """When everything is settled: the parameters here, by name, that other processes hold as this one does."""

    @property
    def units(self) -> Sequence[DenseUnit]:
        """Groups that cross by exchanges, which may keep something for each rank."""

    @property
    def lent_bytes(self) -> float:
        """Weights of others that it holds for a moment, in the mean."""


def set_up_stages(plan: Plan, job: TrainJob, transport: Transport, first_step: int) -> StageSetup:
    """
    Args:
        first_step: how many steps were taken before.

    Raises:
        ValueError: the model cannot be cut there, the loss cannot be taken apart, or an edge that remembers samples
            finds none in the example.
    """
    options, channel = options_of(plan), CountedChannel(transport)
    seed = seed_from_step(job.seed, first_step)
    if not options.method.is_cut:
        names = {name: name for name, _ in job.model.named_parameters()}
        whole = Stage(0, job.model, names) if job.loss is None else whole_stage(job.model, job.loss, job.example)
        spec = TrainSpec(options.schedule(), lambda output, batch: output, seed, clip=options.clip)
        return StageSetup(plan, options, job, transport, channel, [whole], spec, lambda batch: batch)
    assert job.loss is not None
    split = SplitLoss(job.loss, job.model, job.example)
    value = split.input_of(job.example)
    codes = codes_of(options.edges, first_step)
    if any(code.cache_bytes for code in codes.values()):
        sample_keys(value)  # or it is refused here, before the first step
    stages = stages_of(job.model, value, options.points)
    refuse_ties(plan, stages)
    refuse_other_groups(plan, stages)
    options.method.objectives.refuse_stages(options, [stage.module for stage in stages])
    coded = coded_leaves(job.model, plan, value)
    is_traced = len(stages) > 1 and not isinstance(job.model, nn.Sequential)
    input_of = TracedInput(split, value).input_of if is_traced else split.input_of
    spec = TrainSpec(
        options.schedule(), split.of_output, seed, frozenset(options.recompute), options.clip,
        corrections=options.built_corrections(), objectives=options.method.objectives.of(options),
        codes=codes, lends=options.method.residency.lends_weights,
        residency=options.method.residency.activations(options),
    )  # fmt: skip
    return StageSetup(plan, options, job, transport, channel, stages, spec, input_of, coded, is_traced)


def ranks_of(parts: StageSetup) -> Ranks:
    """Who runs what, of this rank's replica."""
    rank, workers = parts.rank, parts.spec.schedule.workers
    if parts.options.method.replicates_table:
        return [rank] * workers
    together = parts.plan.mesh.sharing_data(rank)
    return parts.options.ranks(together if len(together) == workers else range(workers))


def replicas_of(parts: StageSetup) -> StageReplicas:
    """The ranks that hold the same stages."""
    mesh, whole = parts.plan.mesh, parts.transport.place
    replicas = parts.options.replicas(whole.workers)
    place = RankInfo(0, 1) if replicas == 1 else data_place(mesh, whole)
    is_everybody = replicas == whole.workers
    if not is_everybody and replicas > 1:
        parts.transport.open_axis(DATA, mesh.members(DATA))
    return StageReplicas(place, parts.channel, "world" if is_everybody else DATA, _groups(parts, place))


def _groups(parts: StageSetup, place: RankInfo) -> dict[int, list[DenseUnit]]:
    """What crosses by exchanges, of the stages here.

    Args:
        place: of this rank among the replicas.
    """
    where = placed(parts.spec.schedule, ranks_of(parts))
    here = {stage.index for stage in parts.stages if parts.rank in where.ranks(stage.index)}
    named, found = dict(parts.job.model.named_parameters()), dict[int, list[DenseUnit]]()
    for group in parts.plan.groups:
        choice = group.exchange
        if choice is not None and choice.name in dense_exchanges() and group.stage in here:
            members = {name: named[name] for name in group.parameters}
            unit = dense_unit(group.name, members, build_dense(choice.name, **choice.options), place)
            found.setdefault(group.stage, []).append(unit)
    return found


Cut = Callable[[nn.Module, tuple[Any, ...], Sequence[str]], Sequence[Stage]]


def cut_model(loss: Loss, model: nn.Module, example: Batch, options: ScheduleOptions, cut: Cut = stages_of) -> CutModel:
    """
    Args:
        cut: by whom; whoever compares the stages with the model himself may take `cut_at`.

    Raises:
        ValueError: the model or the loss cannot be cut there.
    """
    if not options.method.is_cut:
        return CutModel([Whole(model, loss)], _given, lambda batch: batch)
    split = SplitLoss(loss, model, example)
    stages = cut(model, split.input_of(example), options.points)
    return CutModel([stage.module for stage in stages], split.of_output, split.input_of)


def _given(loss: Tensor, batch: Batch) -> Tensor:
    """The loss of a loss."""
    return loss


def share_first(stages: Sequence[Stage], owners: Sequence[int], transport: Transport) -> None:
    """Collective, before the first step: copies of what stages share are their owner's. owners: by stage, its rank."""
    for tie in ties_of(stages).values():
        for parameter in tie.parameters.values():
            transport.spread(parameter, owners[tie.owner])


def _first_held(stages: Sequence[Stage], stage: Stage) -> list[nn.Parameter]:
    """What no stage before holds, too."""
    before = {id(p) for one in stages[: stage.index] for p in one.module.parameters()}
    return [p for p in stage.module.parameters() if id(p) not in before]


class OwnStages:
    """
    Args:
        stages: of the whole model.
        kept: numbers of those kept here.
    """

    def __init__(self, stages: Sequence[Stage], kept: Collection[int], transport: Transport) -> None:
        self._stages, self._transport = stages, transport
        mine = {id(p) for stage in stages if stage.index in kept for p in stage.module.parameters()}
        self._buffers = [b for stage in stages if stage.index in kept for b in stage.module.buffers()]
        self._held = {stage.index: _first_held(stages, stage) for stage in stages}
        self._away = [(p, p.shape) for held in self._held.values() for p in held if id(p) not in mine]
        self._empty()

    @contextmanager
    def whole(self, owners: Sequence[int], keepers: Sequence[int]) -> Iterator[None]:
        """Collective; inside, every process has the whole model.

        Args:
            owners: by stage, the process whose parameters everybody gets.
            keepers: by stage, the process whose buffers; a process has its own again afterwards.
        """
        mine = [buffer.clone() for buffer in self._buffers]
        for parameter, shape in self._away:
            parameter.data = parameter.data.new_empty(shape)
        with torch.no_grad():
            for stage in self._stages:
                for parameter in self._held[stage.index]:
                    self._transport.spread(parameter, owners[stage.index])
                for buffer in stage.module.buffers():
                    self._transport.spread(buffer, keepers[stage.index])
        try:
            yield
        finally:
            for buffer, kept in zip(self._buffers, mine, strict=True):
                buffer.copy_(kept)
            self._empty()

    def _empty(self) -> None:
        for parameter, _ in self._away:
            parameter.data = parameter.data.new_empty(0)


class LentStages:
    """Until its `hooks` are closed a module that reads weights which are not here is refused.

    Args:
        stages: of the whole model, cut. borrowed: those of them that others own.
        spread: collective; overwrites a tensor with that of a process.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Stage],
        borrowed: Mapping[int, UnshardedStage],
        spread: Callable[[Tensor, int], None],
    ) -> None:
        self._stages, self._borrowed, self._spread = stages, borrowed, spread
        self._is_whole = False
        self._owner = {id(p): j for j, one in borrowed.items() for p in one.flat.parameters}
        self.hooks = ExitStack()
        for path, module in model.named_modules():
            for hook in self._watched(path, module):
                self.hooks.callback(hook.remove)

    def _watched(self, path: str, module: nn.Module) -> Iterator[Any]:
        if any(id(p) in self._owner for p in module.parameters(recurse=False)):
            yield module.register_forward_pre_hook(lambda module, given: self._refuse_blank(path, module))

    def _refuse_blank(self, path: str, module: nn.Module) -> None:
        """
        Raises:
            RuntimeError: it reads the model's own parameters, which hold nothing, instead of what has been lent.
        """
        read = sorted({self._owner[id(p)] for p in module.parameters(recurse=False) if id(p) in self._owner})
        if read and not self._is_whole:
            raise RuntimeError(
                f"schedule: {path or 'the model'} reads weights of stage {read[0]}, which are not here: this process "
                f"holds those that it owns, and others only while a step uses them. Use run.evaluate or "
                f"run.export, or take a schedule that keeps all weights on every process"
            )

    @contextmanager
    def whole(self, owners: Sequence[int]) -> Iterator[None]:
        """Collective; inside, every process has the weights of all stages.

        Args:
            owners: by stage.
        """
        for borrowed in self._borrowed.values():
            for parameter in borrowed.flat.parameters:
                parameter.data = parameter.data.new_empty(parameter.shape)
        with torch.no_grad():
            for stage in self._stages:
                for parameter in (p for p in stage.module.parameters() if p.requires_grad):
                    self._spread(parameter, owners[stage.index])
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            for borrowed in self._borrowed.values():
                borrowed.blank()
