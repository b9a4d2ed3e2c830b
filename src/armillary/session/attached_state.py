"""What a user changed between two steps of a run whose schedule owns the loop, refused before the step begins.

Stages, groups and messages were built for model and optimizer as they were. A step would miss a later change, or see
only some of it. A refused step leaves the run as it was: it can be saved and closed. Micro-batches are compared too:
all ranks of a replica must be given the same.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.prefetch.batches import leaves
from armillary.runtime.bucket import other_form
from armillary.session.plan_validation import gradient_hooks, step_hooks
from armillary.session.stage_setup import StageSetup
from armillary.session.workload import Batch
from armillary.tables.optimizers import kind_of
from armillary.transport.agreement import checksum
from armillary.transport.transport import Transport

__all__ = ["AttachedState", "attached_state", "refuse_other_batches"]


def refuse_other_batches(transport: Transport, wanted: range, batches: Sequence[Batch]) -> None:
    """Collective. wanted: the numbers of those that this rank hands in.

    Raises:
        ValueError: ranks that hand in the same numbers were given different data.
    """
    mine = [checksum(leaf) for leaf in leaves(batches) if isinstance(leaf, Tensor)]
    with transport.unrecorded():
        everyones = transport.share((list(wanted), mine))
    first = dict[tuple[int, ...], int]()
    for rank, (numbers, sums) in enumerate(everyones):
        other = first.setdefault(tuple(numbers), rank)
        if sums != everyones[other][1]:
            raise ValueError(
                f"run.step: ranks {other} and {rank} hand in the same micro-batches {numbers} of a step, as they "
                "hold stages of one replica, but were given different data; give every rank the same (run.shard "
                "does)"
            )


Kind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True, eq=False)
class AttachedState:
    """
    Args of note:
        who: begins every complaint: the rank and its schedule.
        parameters: of the model, by name. trained: names of those that were trained.
        kinds: dtype and device of each parameter, by name.
        groups: the parameters of each of the optimizer's groups.
        modules: by path, of a model that was traced; else none. training: paths of those that were in training mode.
        is_by_run: whether steps are taken by `run.step`, so that autograd never meets the parameters themselves.
        hooks: ids of the run's own, which the optimizer calls when it steps.
    """

    who: str
    optimizer: Optimizer
    parameters: Mapping[str, nn.Parameter]
    trained: frozenset[str]
    kinds: Mapping[str, Kind]
    groups: tuple[tuple[Tensor, ...], ...]
    modules: Mapping[str, nn.Module]
    training: frozenset[str]
    is_by_run: bool
    hooks: frozenset[int]

    def refuse_changed(self) -> None:
        """
        Raises:
            ValueError: something is no longer as it was.
        """
        if complaint := next(self._complaints(), ""):
            raise ValueError(f"{self.who}: {complaint}")

    def warn_of_mode(self) -> None:
        if self.modules and "" not in self.training:
            warnings.warn(
                "attach: the model is in eval mode, and its forward was traced so: in every step dropout is off and "
                "batch statistics stand still; if that is not meant, call model.train() before attach",
                stacklevel=2,
            )

    def _complaints(self) -> Iterator[str]:
        yield from self._other_kinds()
        yield from self._other_training()
        yield from self._other_groups()
        yield from self._other_modes()
        if self.is_by_run:
            yield from gradient_hooks(self.parameters)
        yield from step_hooks(self.optimizer, self.hooks)

    def _other_kinds(self) -> Iterator[str]:
        for name, parameter in self.parameters.items():
            if (parameter.dtype, parameter.device) != self.kinds[name]:
                yield other_form(name, _text(parameter.dtype, parameter.device), _text(*self.kinds[name]))

    def _other_training(self) -> Iterator[str]:
        changed = [
            one for one, parameter in self.parameters.items() if parameter.requires_grad != (one in self.trained)
        ]
        if changed:
            is_frozen = changed[0] in self.trained
            yield (
                f"{changed[0]} was {'frozen' if is_frozen else 'unfrozen'} since the run began, which its steps would "
                f"not follow{f' (likewise {len(changed) - 1} more)' if len(changed) > 1 else ''}; call run.close(), "
                "set requires_grad then, plan again and attach anew"
            )

    def _other_groups(self) -> Iterator[str]:
        now = [group["params"] for group in self.optimizer.param_groups]
        if len(now) != len(self.groups):
            yield (
                f"{kind_of(self.optimizer)} has {len(now)} parameter groups, when the run began it had "
                f"{len(self.groups)}; call run.close(), add or drop groups then, and attach again"
            )
        for number, (held, then) in enumerate(zip(now, self.groups)):
            if len(held) != len(then) or any(one is not other for one, other in zip(held, then)):
                yield (
                    f"parameter group {number} of {kind_of(self.optimizer)} holds other parameters than when the run "
                    "began; put them back, call run.close(), change it then, and attach again"
                )

    def _other_modes(self) -> Iterator[str]:
        changed = [path for path, one in self.modules.items() if one.training != (path in self.training)]
        if changed:
            then, now = ("train", "eval") if changed[0] in self.training else ("eval", "train")
            yield (
                f"{f'module {changed[0]!r}' if changed[0] else 'the model'} is in {now} mode now, but its forward was "
                f"traced in {then} mode, and is run so; call {then}() as before (run.evaluate does it by itself), or "
                f"run.close(), {now}() and attach again"
            )

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Inside, for what is under way: groups and hooks that were added are set aside, and what was trained is.
        Afterwards all is as the user has it."""
        changed = [one for name, one in self.parameters.items() if one.requires_grad != (name in self.trained)]
        added = self.optimizer.param_groups[len(self.groups) :]
        del self.optimizer.param_groups[len(self.groups) :]
        _turn(changed)
        both = _step_hooks(self.optimizer)
        aside = [{number: hooks.pop(number) for number in [*hooks] if number not in self.hooks} for hooks in both]
        try:
            yield
        finally:
            for hooks, others in zip(both, aside):
                hooks.update(others)
            _turn(changed)
            self.optimizer.param_groups.extend(added)


def _text(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"


def _step_hooks(optimizer: Optimizer) -> Sequence[dict[int, Callable[..., Any]]]:
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def _turn(parameters: Iterable[nn.Parameter]) -> None:
    """What was trained is frozen, and the other way."""
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)


def attached_state(who: str, parts: StageSetup) -> AttachedState:
    """As they are now, with what the run has put into them; step hooks of the user's there are none."""
    model, optimizer = parts.job.model, parts.job.optimizer
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules()) if parts.is_traced else {}
    return AttachedState(
        who,
        optimizer,
        parameters,
        frozenset(name for name, one in parameters.items() if one.requires_grad),
        {name: (one.dtype, one.device) for name, one in parameters.items()},
        tuple(tuple(group["params"]) for group in optimizer.param_groups),
        modules,
        frozenset(path for path, one in modules.items() if one.training),
        parts.job.loss is not None,
        frozenset(number for hooks in _step_hooks(optimizer) for number in hooks),
    )
