"""A model and its loss in parts, for loops over stages in one process."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from armillary.facts.split_loss import SplitLoss
from armillary.reference.beside_whole import CutModel
from armillary.runtime.partition.stages import Stage
from armillary.runtime.profiling.probe import Loss
from armillary.schedules.method import ScheduleOptions
from armillary.session.cyclic.stages import stages_of
from armillary.session.cyclic.whole import Whole
from armillary.session.workload import Batch

__all__ = ["cut_model"]

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
