"""Nesterov's look-ahead for stages that read old weights: the step goes along the gradient and the momentum after it.

With a delay of one step and momentum 0.9 it restores 2.5 times the stable learning rate (0.253 / curvature against
0.1). NAdam is the same for Adam; being another optimizer, it is the user's to choose: torch.optim.NAdam.

Source: Ajanthan et al., 2025 (Nesterov's method under pipeline delay); Dozat, 2016 (NAdam).
"""

from armillary.schedules.corrections.correction import Correction, Options, register_correction

__all__ = ["nesterov"]


@register_correction
def nesterov() -> Correction:
    """SGD with momentum steps as with nesterov=True."""
    return Correction(
        says="nesterov: stages with stale weights step along gradient and next momentum", unfit=_unfit, step_options=_on
    )


def _unfit(options: Options) -> str:
    if "nesterov" not in options or not options.get("momentum") or options.get("dampening"):
        return "nesterov wants SGD with momentum and no dampening; with Adam, take torch.optim.NAdam instead"
    return ""


def _on(options: Options, share: float) -> Options:
    return {**options, "nesterov": True}
