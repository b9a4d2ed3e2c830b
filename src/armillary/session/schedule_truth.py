"""A model trained by the truth of a schedule whose meaning exists only at its cuts: loops over stages, in one process.

Weights of several ages, coded edges, losses of a stage's own and random numbers that a stage draws are such. `verify`
holds runs to it once the stages were seen to be the whole model (`reference/beside_whole`). `twin` trains it, since
what crosses between stages is coded there as codecs mean it. It is given the stages, and knows no runtime.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_dense
from armillary.facts.plan import Plan
from armillary.reference.beside_whole import CutModel
from armillary.reference.crossing import Crossing
from armillary.reference.cyclic import Reference
from armillary.reference.cyclic_workers import WorkersReference
from armillary.reference.edges import Edges
from armillary.schedules.edge import codes_of
from armillary.schedules.registry import options_of
from armillary.session.truths import departing
from armillary.session.workload import Batch

__all__ = ["ScheduleTruth"]


class ScheduleTruth:
    """
    Args:
        plan: of the model, under a schedule that owns the loop.
        model: it is trained in place, by `optimizer`, which is over its parameters.
        cut: the model, where the plan cuts it.
        seed: of all that is drawn.
    """

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, cut: CutModel, seed: int) -> None:
        self.model, self.options, self._cut = model, options_of(plan), cut
        self.edges = Edges(codes_of(self.options.edges), seed, self.options.stages)
        self._reference = self._made(plan, optimizer, seed)

    def _made(self, plan: Plan, optimizer: Optimizer, seed: int) -> Reference | WorkersReference:
        options, (stages, loss, _) = self.options, self._cut
        workers = options.replicas(plan.workers)
        if workers > 1:
            side_by_side = WorkersReference(stages, optimizer, options.schedule(), loss, seed, options.clip)
            side_by_side.crossings = _crossings(plan, dict(self.model.named_parameters()), workers)
            side_by_side.edges = self.edges
            side_by_side.objectives = options.method.objectives(options)
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


def _crossings(plan: Plan, named: Mapping[str, nn.Parameter], workers: int) -> list[Crossing]:
    """Of the groups whose exchange is not exact."""
    found = []
    for group, choice in departing(plan):
        members = [named[name] for name in group.parameters]
        found.append(Crossing(group.parameters, members, build_dense(choice.name, **choice.options), workers))
    return found
