"""A lower learning rate for stages with stale weights: as much lower as their stability bound is.

On a quadratic of some curvature, heavy-ball momentum mu is stable up to a rate of 2 (1 + mu) / curvature with fresh
weights; with a share s of the micro-batches one step late, up to (1 - mu) / (s curvature), and below one half also up
to 2 (1 + mu) / ((1 - 2s) curvature). The rate is multiplied by the ratio of the bounds, at most 1: with mu = 0.9 and
all late, by 1 / 38.

Source: the characteristic polynomial z^2 - (1 + mu - a (1 - s)) z + (mu + a s) of the delayed iteration, a = rate times
curvature; checked numerically in the tests.
"""

from armillary.schedules.corrections.correction import Correction, Options, register_correction

__all__ = ["rate_scale", "stable_rate"]


@register_correction
def stable_rate() -> Correction:
    """For every optimizer; where it has no momentum, mu is 0."""
    return Correction(says="stable_rate: stages with stale weights step at a rate lowered to their stability bound",
                  step_options=_lowered)  # fmt: skip


def rate_scale(share: float, momentum: float) -> float:
    """The bound with `share` of the micro-batches one step late over that without any."""
    fresh = 2 * (1 + momentum)
    bounds = [fresh]
    if share > 0:
        bounds.append((1 - momentum) / share)
    if share < 1 / 2:
        bounds.append(fresh / (1 - 2 * share))
    return min(bounds) / fresh


def _lowered(options: Options, share: float) -> Options:
    momentum = options.get("momentum") or options.get("betas", (0.0,))[0]
    return {**options, "lr": options["lr"] * rate_scale(share, float(momentum))}
