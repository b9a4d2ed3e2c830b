"""Weights predicted forward: who would read old weights reads them where momentum will have carried them.

    weight - steps * learning rate * direction

The direction is SGD's momentum buffer, or Adam's first moment over the root of its second, both freed of their bias.
Rate and direction are those of the step that made the weights. Fresh weights are read as they are.

Source: SpecTrain (Chen et al., 2018); XPipe (Guan et al., 2019) for Adam. Departure from PipeMare, which corrects the
backward only: here forward and backward read the same weights.
"""

from torch import Tensor

from armillary.schedules.corrections.correction import Correction, Options, register_correction

__all__ = ["weight_prediction"]


@register_correction
def weight_prediction() -> Correction:
    """For SGD with momentum, Adam, AdamW and NAdam."""
    return Correction(
        says="weight_prediction: stale weights are read where momentum will have carried them", copies=1,
        unfit=_unfit, ahead=_ahead,
    )  # fmt: skip


def _unfit(options: Options) -> str:
    if options.get("momentum") or (len(options.get("betas", ())) == 2 and "eps" in options):
        return ""
    return "weight_prediction wants momentum to go by: SGD with momentum, Adam, AdamW or NAdam"


def _ahead(weight: Tensor, state: Options, options: Options, steps: int) -> Tensor:
    direction = _direction(state, options)
    if direction is None:  # never stepped
        return weight
    moved: Tensor = direction * (steps * options["lr"])
    return weight - moved


def _direction(state: Options, options: Options) -> Tensor | None:
    if "exp_avg_sq" in state:
        first, second = options["betas"]
        count = float(state["step"])
        mean, square = state["exp_avg"] / (1 - first**count), state["exp_avg_sq"] / (1 - second**count)
        direction: Tensor = mean / (square.sqrt() + options["eps"])
        return direction
    buffer: Tensor | None = state.get("momentum_buffer")
    return buffer
