"""A workload trained by the truth of a schedule that owns the loop: plain loops in one process that know no runtime.

`verify` holds runs to it. `twin` trains it, since what crosses between stages is coded there as codecs mean it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_dense
from armillary.facts.plan import Plan
from armillary.reference.crossing import Crossing
from armillary.reference.cyclic import Reference
from armillary.reference.cyclic_workers import WorkersReference
from armillary.reference.edges import Edges
from armillary.schedules.edge import codes_of
from armillary.schedules.registry import options_of
from armillary.session.cyclic.split_loss import SplitLoss
from armillary.session.cyclic.stages import stages_of
from armillary.session.cyclic.tables import table_groups
from armillary.session.cyclic.whole import Whole
from armillary.session.edges_at_eval import coded_leaves
from armillary.session.feed import Feed
from armillary.session.truths import coded_rows, departing
from armillary.session.workload import Batch, Workload

__all__ = ["ScheduleTruth"]


class ScheduleTruth:
    """
    Args:
        model: it is trained in place, by `optimizer`, which is over its parameters.
        plan: of the model, under a schedule that owns the loop.
        seed: of the data and of all that is drawn.

    Raises:
        ValueError: the model or the loss cannot be cut as the plan says.
    """

    def __init__(self, workload: Workload, plan: Plan, model: nn.Module, optimizer: Optimizer, seed: int) -> None:
        self.model, self.options = model, options_of(plan)
        self.micro_batches = self.options.total(plan.workers)  # of a step, those of all processes
        is_cut = self.options.method.is_cut
        example = next(Feed(workload, (0, self.micro_batches), seed))
        self._cut = _cut(workload, model, example, self.options.points) if is_cut else _left_whole(workload, model)
        self.coded = coded_leaves(model, plan, self._cut.input_of(example)) if is_cut else ()
        self.edges = Edges(codes_of(self.options.edges), seed, self.options.stages)
        self._reference = self._made(plan, optimizer, seed)

    def _made(self, plan: Plan, optimizer: Optimizer, seed: int) -> Reference | WorkersReference:
        options, (stages, loss, _) = self.options, self._cut
        named = dict(self.model.named_parameters())
        tables = {named[group.parameters[0]]: group.is_lazy for group in table_groups(plan)}
        workers = options.replicas(plan.workers)
        if tables or workers > 1:
            schedule = options.schedule()
            side_by_side = WorkersReference(stages, optimizer, schedule, loss, tables, seed, options.clip)
            side_by_side.crossings = _crossings(plan, named, workers)
            side_by_side.edges = self.edges
            side_by_side.rows = {named[name]: meanings for name, meanings in coded_rows(plan).items()}
            return side_by_side
        own = range(options.micro_batches) if options.method.keeps_own_statistics else None
        reference = Reference(stages, optimizer, options.schedule(), loss, seed, own, options.clip)
        reference.edges = self.edges
        reference.corrections = options.built_corrections()
        reference.objectives = options.method.objectives(options)
        return reference

    def step(self, batches: Sequence[Batch]) -> None:
        """One training step. batches: its micro-batches, those of all processes, in their order."""
        given = [(self._cut.input_of(batch), batch) for batch in batches]
        if isinstance(self._reference, WorkersReference):
            count = self._reference.schedule.micro_batches
            self._reference.step([given[first : first + count] for first in range(0, len(given), count)])
        else:
            self._reference.step(given)

    def drain(self) -> None:
        """Everything before the next step has finished."""
        self._reference.drain()

    def own_buffers(self) -> list[dict[str, Tensor]]:
        """By process, its buffers by the model's names; empty where the model's own are all there are."""
        names = {id(buffer): name for name, buffer in self.model.named_buffers()}
        found = []
        for own in self._reference.buffers:
            theirs: dict[str, Tensor] = {}
            for stage, buffers in zip(self._reference.stages, own, strict=True):
                local = dict(stage.named_buffers())
                theirs |= {names[id(local[n])]: buffer for n, buffer in buffers.items() if id(local[n]) in names}
            found.append(theirs)
        return found


class _Cut(NamedTuple):
    """Stages, what the last one's loss is, what the first one reads of a batch."""

    stages: Sequence[nn.Module]
    loss: Callable[[Any, Any], Tensor]
    input_of: Callable[[Batch], Any]


def _cut(workload: Workload, model: nn.Module, example: Batch, points: Sequence[str]) -> _Cut:
    split = SplitLoss(workload.loss, model, example)
    stages = stages_of(model, split.input_of(example), points)
    return _Cut([stage.module for stage in stages], split.of_output, split.input_of)


def _left_whole(workload: Workload, model: nn.Module) -> _Cut:
    return _Cut([Whole(model, workload.loss)], _given, lambda batch: batch)


def _given(loss: Tensor, batch: Batch) -> Tensor:
    """The loss of a loss."""
    return loss


def _crossings(plan: Plan, named: Mapping[str, nn.Parameter], workers: int) -> list[Crossing]:
    """Of the groups whose exchange is not exact."""
    found = []
    for group, choice in departing(plan):
        members = [named[name] for name in group.parameters]
        found.append(Crossing(group.parameters, members, build_dense(choice.name, **choice.options), workers))
    return found
