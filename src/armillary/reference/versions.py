"""The truth of schedules with versions: plain loops in one process over steps, micro-batches and stages.

The user's optimizer steps the whole model once per training step, so its rate, momentum and weight decay belong to that
step by construction. Only gradients are taken at older weights, where the schedule's staleness says so. Gradients are
summed in micro-batch order and divided once, by M. Every runtime must equal this bit for bit on a CPU.

Clipping is `schedules/clipping.py`'s: by the norm over all stages it is torch's clip_grad_norm_ on the mean gradient.
Autocast is that of the caller for forward and loss; backward and the optimizer run without, as torch recommends.

BatchNorm: statistics are those of each micro-batch, never of several. Running statistics never enter training. They are
kept in micro-batch order in one copy (one device, pipeline), or in one per worker (`copies`), as a ring keeps them.

With several workers side by side (`WorkersReference`) each takes its own micro-batches. The mean over workers is taken
in their order; where an exchange is not exact, it is what its oracle makes of the workers' means.

Source: Fournier & Oyallon, 2024, update rules CDP-v1 and v2. Departure: the authors' replicas apply a delayed gradient
with the learning rate of the next step, and so drift apart when the rate changes; here the rate is the gradient's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from armillary.models.structure import mapped
from armillary.reference.edges import Edges
from armillary.reference.serial import Crossing, clip_gradients
from armillary.reference.whole_model import with_own_loss
from armillary.schedules.clipping import Clip
from armillary.schedules.corrections.correction import Correction, stale_share
from armillary.schedules.method import Objective
from armillary.schedules.random_streams import seeded
from armillary.schedules.schedule import Schedule

__all__ = ["Reference", "WorkersReference"]

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


class Reference:
    """Trains `stages` one after the other; `step` is one training step, the user's loop around it stays plain.

    Args:
        stages: the model, cut; each takes what the one before returns.
        optimizer: over the parameters of all stages.
        loss: loss(output, target) -> scalar mean over one micro-batch.
        copies: for every micro-batch, which copy of the buffers it uses and updates; else the model's own.
        clip: of the mean gradient of every step.

    Raises:
        ValueError: the schedule has other stages, or a parameter is in two of them that read old weights.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: Optimizer,
        schedule: Schedule,
        loss: Callable[[Any, Any], Tensor],
        seed: int = 0,
        copies: Sequence[int] | None = None,
        clip: Clip | None = None,
    ) -> None:
        if len(stages) != schedule.stages:
            raise ValueError(f"reference: the schedule has {schedule.stages} stages, the model {len(stages)}")
        everywhere = [parameter for stage in stages for parameter in stage.parameters()]
        if schedule.stale_share and len(everywhere) != len({id(parameter) for parameter in everywhere}):
            raise ValueError("reference: a parameter is in two stages; want stages without tied weights")
        self.stages, self.optimizer, self.schedule, self.loss, self.seed = stages, optimizer, schedule, loss, seed
        self.drains: list[int] = []
        self.buffers = [
            [{name: buffer.clone() for name, buffer in stage.named_buffers()} for stage in stages]
            for _ in range(max(copies, default=0) + 1)
        ] if copies is not None else []  # fmt: skip
        self._copies, self._step = copies, 0
        self._clip, self._squares = clip, dict[int, Tensor]()  # of the whole gradient, by step
        self._device_type = everywhere[0].device.type if everywhere else "cpu"
        self._history: dict[int, Weights] = {}
        self.corrections: Sequence[Correction] = ()  # to be set before the first step
        self.edges = Edges()  # how what crosses a cut is coded, likewise
        self.objectives: Mapping[int, Objective] = {}  # of uncoupled stages, likewise
        self._ahead: dict[int, Weights] = {}  # the same versions, as they may be a step later
        self._made_with: list[dict[str, Any]] = []  # the optimizer's groups at the last step since the last drain
        self._before: dict[nn.Parameter, Tensor] = {}  # mean gradients of that step

    def drain(self) -> None:
        """Everything before the next step has finished: it reads no older weights than its own."""
        self.drains.append(self._step)
        self._made_with, self._before = [], {}
        self._ahead.clear()

    def step(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """One training step; returns the loss of every micro-batch."""
        self._history[self._step] = [
            {name: p.detach().clone() for name, p in stage.named_parameters()} for stage in self.stages
        ]
        if self._made_with:
            self._ahead[self._step] = [self._foreseen(stage) for stage in self.stages]
        for version in [v for v in self._history if v < self._step - max(map(max, self.schedule.staleness))]:
            del self._history[version]
            self._ahead.pop(version, None)
        losses: list[Tensor] = []
        totals: dict[nn.Parameter, Tensor] = {}
        for micro_batch, batch in enumerate(micro_batches):
            value, gradients = self._gradients(micro_batch, batch)
            losses.append(value)
            for parameter, gradient in gradients:
                totals[parameter] = totals[parameter] + gradient if parameter in totals else gradient
        for parameter, total in totals.items():
            parameter.grad = total / self.schedule.micro_batches
        if self._clip is not None:
            clip_gradients(self.stages, self._clip, self._step, self._squares, self.drains)
        self._made_with = [dict(group) for group in self.optimizer.param_groups] if self.corrections else []
        with torch.autocast(self._device_type, enabled=False):
            self._step_stage_by_stage() if self.corrections else self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return losses

    def _foreseen(self, stage: nn.Module) -> dict[str, Tensor]:
        """Weights of a stage as a correction says that they will be a step later; as they are, if none says
        anything."""
        share = stale_share(self.schedule, list(self.stages).index(stage))
        group_of = {}
        for group in self._made_with:
            options = dict(group)
            for correction in self.corrections if share else ():
                options |= correction.step_options(options, share) if correction.step_options is not None else {}
            group_of.update(dict.fromkeys(group["params"], options))
        found = {}
        for name, parameter in stage.named_parameters():
            found[name] = parameter.detach().clone()
            for correction in self.corrections:
                if correction.ahead is not None and parameter in group_of:
                    state = self.optimizer.state.get(parameter, {})
                    found[name] = correction.ahead(found[name], state, group_of[parameter], 1)
        return found

    def _step_stage_by_stage(self) -> None:
        """The whole model's step; where a stage has stale weights, a correction may change its gradient and its
        options."""
        means = {p: p.grad for stage in self.stages for p in stage.parameters() if p.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        for j, stage in enumerate(self.stages):
            share = stale_share(self.schedule, j)
            usual = [dict(group) for group in self.optimizer.param_groups]
            for parameter in stage.parameters():
                parameter.grad = means.get(parameter)
            for correction in self.corrections if share else ():
                for parameter in stage.parameters():
                    if correction.gradient is not None and parameter.grad is not None and parameter in self._before:
                        parameter.grad = correction.gradient(parameter.grad, self._before[parameter], share)
                for group in self.optimizer.param_groups:
                    group.update(correction.step_options(group, share) if correction.step_options is not None else {})
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            for group, options in zip(self.optimizer.param_groups, usual):
                group.update(options)
        self._before = means

    def _gradients(self, micro_batch: int, batch: MicroBatch) -> tuple[Tensor, Iterable[tuple[nn.Parameter, Tensor]]]:
        """Loss of one micro-batch and its gradients, at the weights the schedule names; unused ones are left out."""
        leaves: list[Tensor] = []
        parameters: list[nn.Parameter] = []
        value, target = batch
        losses: list[Tensor] = []
        for j, stage in enumerate(self.stages):
            place = self._step, micro_batch, j
            version = self.schedule.version(place, self.drains)
            old = self._history[version][j]
            if version < self._step and version in self._ahead:
                old = self._ahead[version][j]
            weights = {}
            for name, parameter in stage.named_parameters():
                weights[name] = old[name].detach().requires_grad_(parameter.requires_grad)
                if parameter.requires_grad:
                    leaves.append(weights[name])
                    parameters.append(parameter)
            buffers = self.buffers[self._copies[micro_batch]][j] if self._copies is not None else {}
            device = next((p.device for p in weights.values()), torch.device("cpu"))
            came = value
            with seeded(self.seed, place, device):
                if j in self.objectives:
                    value, own = with_own_loss(stage, {**weights, **buffers}, value, self._learns(j, target))
                    losses.append(own)
                    value = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)
                else:
                    value = functional_call(stage, {**weights, **buffers}, (value,))
                if stage is self.stages[-1]:
                    value = self.loss(value, target)
                else:
                    value = self.edges.crossed(value, came, place, batch[0])
        with torch.autocast(self._device_type, enabled=False):
            gradients = torch.autograd.grad([*losses, value], leaves, allow_unused=True)
        return value.detach(), [(p, g.to_dense()) for p, g in zip(parameters, gradients) if g is not None]

    def _learns(self, j: int, target: Any) -> Callable[[nn.Module, Any], Tensor]:
        """What an uncoupled stage learns from, of its module and its output."""
        return lambda stage, output: self.objectives[j](stage, output, target, self.loss)
