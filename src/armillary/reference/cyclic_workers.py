"""The truth of a cyclic schedule on several workers side by side: plain loops in one process.

Every version of every weight is kept while it may be read. Each worker takes its own micro-batches through the stages
at the versions the schedule names, and the mean of its own gradients. Then the mean over workers is taken, in their
order; where an exchange is not exact, what its oracle makes of these means. Then the user's optimizer steps the whole
model once. Buffers are each worker's own.

Source: Fournier & Oyallon, 2024 (update rule).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from armillary.facts.structure import mapped
from armillary.reference.clipped import clip_gradients
from armillary.reference.crossing import Crossing
from armillary.reference.edges import Edges
from armillary.reference.own_loss import with_own_loss
from armillary.schedules.clipping import Clip
from armillary.schedules.method import Objective
from armillary.schedules.random_stream import seeded
from armillary.schedules.schedule import Schedule

__all__ = ["WorkersReference"]

MicroBatch = tuple[Any, Any]  # what the first stage reads, and what the loss compares with
Weights = list[dict[str, Tensor]]  # per stage, by the stage's own parameter names
Sums = dict[nn.Parameter, Tensor]


class WorkersReference:
    """`step` is one training step of all workers; the user's loop around it stays plain.

    Args:
        stages: the model, cut; each takes what the one before returns.
        loss: loss(output, target) -> scalar mean over one micro-batch.
        clip: of the mean gradient of every step.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: Optimizer,
        schedule: Schedule,
        loss: Callable[[Any, Any], Tensor],
        seed: int = 0,
        clip: Clip | None = None,
    ) -> None:
        self.stages, self.optimizer, self.schedule, self.loss, self.seed = stages, optimizer, schedule, loss, seed
        self.crossings: Sequence[Crossing] = ()  # groups whose exchange is not exact; set before the first step
        self.drains: list[int] = []
        self.buffers: list[list[dict[str, Tensor]]] = []  # by worker and stage, from the first step on
        self.edges = Edges()  # to be set before the first step
        self.objectives: Mapping[int, Objective] = {}  # of uncoupled stages, likewise
        self._step = 0
        self._clip, self._squares = clip, dict[int, Tensor]()  # of the whole gradient, by step
        self._versions: dict[int, Weights] = {}

    def drain(self) -> None:
        """Everything before the next step has finished: it reads no older weights than its own."""
        self.drains.append(self._step)

    def step(self, batches: Sequence[Sequence[MicroBatch]]) -> list[list[Tensor]]:
        """batches: [worker][micro-batch]. Returns the losses, likewise."""
        self.buffers = self.buffers or [
            [{name: buffer.clone() for name, buffer in stage.named_buffers()} for stage in self.stages] for _ in batches
        ]
        self._versions[self._step] = [
            {name: p.detach().clone() for name, p in stage.named_parameters()} for stage in self.stages
        ]
        for version in [v for v in self._versions if v < self._step - max(map(max, self.schedule.staleness))]:
            del self._versions[version]
        owns: list[Sums] = []  # mean gradients, by worker
        losses: list[list[Tensor]] = []
        for worker, mine in enumerate(batches):
            own: Sums = {}
            losses.append([])
            for micro_batch, batch in enumerate(mine):
                value, gradients = self._gradients(worker, micro_batch, batch)
                losses[-1].append(value)
                for parameter, gradient in gradients:
                    _add(own, parameter, gradient)
            owns.append({parameter: total / len(mine) for parameter, total in own.items()})
        self._average(owns)
        if self._clip is not None:
            clip_gradients(self.stages, self._clip, self._step, self._squares, self.drains)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return losses

    def _average(self, owns: Sequence[Sums]) -> None:
        """The mean over workers, in their order."""
        for crossing in self.crossings:
            mean = crossing.mean([[own.get(parameter) for parameter in crossing.members] for own in owns])
            for parameter, gradient in zip(crossing.members, mean, strict=True):
                parameter.grad = gradient
        crossed = {parameter for crossing in self.crossings for parameter in crossing.members}
        means: Sums = {}
        for own in owns:
            for parameter, mine in own.items():
                if parameter not in crossed:
                    _add(means, parameter, mine)
        for parameter, total in means.items():
            parameter.grad = total / len(owns)

    def _gradients(
        self, worker: int, micro_batch: int, batch: MicroBatch
    ) -> tuple[Tensor, Iterator[tuple[nn.Parameter, Tensor]]]:
        """Loss of one micro-batch and its gradients, at the weights the schedule names; unused ones are left out."""
        leaves: list[Tensor] = []
        parameters: list[nn.Parameter] = []
        value, target = batch
        own = list[Tensor]()  # losses of stages that learn from one
        number = worker * self.schedule.micro_batches + micro_batch  # among those of all workers
        for j, stage in enumerate(self.stages):
            version = self.schedule.version((self._step, micro_batch, j), self.drains)
            weights = {}
            for name, parameter in stage.named_parameters():
                weights[name] = self._versions[version][j][name].detach().requires_grad_(parameter.requires_grad)
                if parameter.requires_grad:
                    leaves.append(weights[name])
                    parameters.append(parameter)
            device = next((weight.device for weight in weights.values()), torch.device("cpu"))
            came = value
            with seeded(self.seed, (self._step, number, j), device):
                tensors = {**weights, **self.buffers[worker][j]}
                if j in self.objectives:
                    value, loss = with_own_loss(stage, tensors, value, self._learns(j, target))
                    own.append(loss)
                    value = mapped(Tensor.detach, value)
                else:
                    value = functional_call(stage, tensors, (value,))
                if stage is self.stages[-1]:
                    value = self.loss(value, target)
                else:
                    value = self.edges.crossed(value, came, (self._step, number, j), batch[0], worker)
        found = torch.autograd.grad([*own, value], leaves, allow_unused=True)
        return value.detach(), ((p, g.to_dense()) for p, g in zip(parameters, found, strict=True) if g is not None)

    def _learns(self, j: int, target: Any) -> Callable[[nn.Module, Any], Tensor]:
        """What an uncoupled stage learns from, of its module and its output."""
        return lambda stage, output: self.objectives[j](stage, output, target, self.loss)


def _add(sums: Sums, parameter: nn.Parameter, gradient: Tensor) -> None:
    sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
