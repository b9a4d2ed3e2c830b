"""Clips the mean gradients of one step where they lie, by the norm that the schedule's clipping names.

What is summed in which order stands in `schedules/clipping.py`.
"""

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from armillary.schedules.clipping import Clip, square_of_stage, square_of_step

__all__ = ["clip_gradients"]


def clip_gradients(
    stages: Sequence[nn.Module], clip: Clip, step: int, squares: dict[int, Tensor], drains: Collection[int]
) -> None:
    """A parameter that several stages hold counts in the first of them.

    Args:
        squares: of the whole gradient, by step; this step's is added.
    """
    first = {p: j for j, stage in reversed(list(enumerate(stages))) for p in stage.parameters()}
    trained = [
        [p for p in stage.parameters() if p.grad is not None and first[p] == j] for j, stage in enumerate(stages)
    ]
    own = {j: square_of_stage(p.grad for p in held if p.grad is not None) for j, held in enumerate(trained)}
    squares[step] = square_of_step(own)
    of = clip.step_of_norm(step, drains)
    for j, held in enumerate(trained):
        factor = clip.factor(own[j] if of is None else squares[of])
        for parameter in held:
            assert parameter.grad is not None
            parameter.grad = parameter.grad * factor
