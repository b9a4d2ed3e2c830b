"""What a schedule took over of a model and its optimizer, as it was then: a step reads it as long as the run is open.

Stages, groups and messages were built for it. So what a user changes between two steps no step would hear of, or only
some of it. It is compared before a step begins, so a refused step leaves the run as it was: it can be saved and closed.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.runtime.hybrid.optimizers import kind_of

__all__ = ["TakenOver", "take_over"]


@dataclass(frozen=True, eq=False)
class TakenOver:
    """
    Args of note:
        who: begins every complaint: the rank and its schedule.
        parameters: of the model, by name. trained: names of those that were trained.
        groups: the parameters of each of the optimizer's groups.
    """

    who: str
    optimizer: Optimizer
    parameters: Mapping[str, nn.Parameter]
    trained: frozenset[str]
    groups: tuple[tuple[Tensor, ...], ...]

    def refuse_changed(self) -> None:
        """
        Raises:
            ValueError: something is no longer as it was.
        """
        with torch._C.DisableTorchFunctionSubclass():  # tables, too, are asked plainly
            complaint = next(self._complaints(), "")
        if complaint:
            raise ValueError(f"{self.who}: {complaint}")

    def _complaints(self) -> Iterator[str]:
        yield from self._other_training()
        yield from self._other_groups()

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

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Inside, for what is under way: groups that were added are set aside, and what was trained is. Afterwards all
        is as the user has it."""
        changed = [one for name, one in self.parameters.items() if one.requires_grad != (name in self.trained)]
        added = self.optimizer.param_groups[len(self.groups) :]
        del self.optimizer.param_groups[len(self.groups) :]
        _turn(changed)
        try:
            yield
        finally:
            _turn(changed)
            self.optimizer.param_groups.extend(added)


def _turn(parameters: Iterable[nn.Parameter]) -> None:
    """What was trained is frozen, and the other way."""
    for parameter in parameters:
        parameter.requires_grad_(not parameter.requires_grad)


def take_over(who: str, model: nn.Module, optimizer: Optimizer) -> TakenOver:
    """As they are now, with what the run has put into them."""
    parameters = dict(model.named_parameters())
    return TakenOver(
        who,
        optimizer,
        parameters,
        frozenset(name for name, one in parameters.items() if one.requires_grad),
        tuple(tuple(group["params"]) for group in optimizer.param_groups),
    )
