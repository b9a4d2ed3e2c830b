"""What a correction against stale weights is, and the registry: one more correction is one more file that registers a
factory.

A correction touches a stage only where some of its micro-batches read old weights. It may change three things, each by
a function of plain values: the options with which the stage's optimizer steps, the gradient that is stepped with, and
the weights that a micro-batch reads which would read old ones. Reference and runtime call the same functions; when they
call them is what each of them must get right on its own.

Source: the catalogue is FTPipe's (Eliad et al., 2021) and SAPipe's (2022); a chain of small transformations is optax's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from armillary.plans.registry import Registry
from armillary.schedules.schedule import Schedule

__all__ = ["CORRECTIONS", "Correction", "Options", "build_correction", "register_correction", "stale_share"]

Options = Mapping[str, Any]  # of one parameter group of an optimizer

Factory = TypeVar("Factory", bound=Callable[[], "Correction"])


@dataclass(frozen=True)
class Correction:
    """
    Args:
        says: one sentence for the reader of a plan.
        copies: tensors of the size of a stage's weights that it keeps.
        unfit: options of a group -> why its optimizer cannot have this correction; empty if it can.
        step_options: (options, share of the micro-batches that are stale) -> options to step with.
        gradient: (mean, mean of the step before, share) -> gradient to step with. Not called where there is no step
            before: in the first step, and in the first one after a drain.
        ahead: (weight, the optimizer's state of it, the options of the step that made it, steps) -> the weight as it
            may be so many steps later. Not called for weights that no step since the last drain has made.
    """

    says: str
    copies: int = 0
    unfit: Callable[[Options], str] = lambda options: ""
    step_options: Callable[[Options, float], Options] | None = None
    gradient: Callable[[Tensor, Tensor, float], Tensor] | None = None
    ahead: Callable[[Tensor, Options, Options, int], Tensor] | None = None


CORRECTIONS: Registry[Callable[[], Correction]] = Registry("correction", "armillary.schedules.corrections")


def register_correction(make: Factory) -> Factory:
    """Registers a factory under its own name."""
    CORRECTIONS.register(make.__name__, make)
    return make


def build_correction(name: str) -> Correction:
    """
    Raises:
        ValueError: no such correction; the message lists those that exist.
    """
    return CORRECTIONS[name]()


def stale_share(schedule: Schedule, stage: int) -> float:
    """Share of the micro-batches that read old weights of a stage."""
    return sum(ages[stage] > 0 for ages in schedule.staleness) / schedule.micro_batches
