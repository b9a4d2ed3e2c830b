"""Error feedback on the delayed gradient: what the last step's gradient missed is added to this one's.

A gradient made one step late is of weights that the step before has left. When the next one is there, it shows by how
much: their difference. A stage of which a share s of the micro-batches is late steps with

    gradient + s * (gradient - gradient of the step before)

which for a quadratic is the gradient at the fresh weights, had they gone on as they went. It raises the noise of single
batches, up to sqrt(5) times, so it is for large ones.

Source: error feedback (Seide et al., 2014), applied to delay instead of compression; this form is ours, since the one
published for delayed Muon could not be read.
"""

from torch import Tensor

from armillary.schedules.corrections.correction import Correction, register_correction

__all__ = ["error_feedback"]


@register_correction
def error_feedback() -> Correction:
    """For every optimizer."""
    return Correction(
        says="error_feedback: stages with stale weights add what the last gradient missed", copies=1, gradient=_fed_back
    )


def _fed_back(mean: Tensor, before: Tensor, share: float) -> Tensor:
    return mean + share * (mean - before)
