"""Cyclic data parallelism in a process: M staggered micro-batches through K stages; side by side on several processes.

Several processes do the same with micro-batches of their own and average gradients.

Source: Fournier & Oyallon, 2024 (single-device mode).
"""

from armillary.plans.mesh import DATA
from armillary.plans.units import bytes_text
from armillary.schedules.accumulation import DEFAULT_MICRO_BATCHES, accumulation
from armillary.schedules.costs import Planned, peak_on_one_device
from armillary.schedules.cyclic import RING_OPTIONS, cyclic
from armillary.schedules.method import Method, OptionRules, Options, Placing
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.simultaneous import simultaneous


def _implied(given: Options, workers: int) -> Options:
    """
    Raises:
        ValueError: several processes with corrections.
    """
    if workers > 1 and given.get("corrections"):
        raise ValueError(
            f"schedule: one_device on {workers} processes knows no corrections, for which its reference has no words; "
            f"drop them, or take 1 process or a pipeline"
        )
    return {}


def _notes(planned: Planned) -> list[str]:
    options, stages = planned.options, planned.stages
    count, cut = options.micro_batches, options.stages
    staggered = peak_on_one_device(planned.schedule, stages)
    one_by_one = peak_on_one_device(accumulation(count, cut), stages)
    at_once = peak_on_one_device(simultaneous(count, cut), stages)
    figures = (
        f"activations at the peak: {bytes_text(staggered)} with this schedule, {bytes_text(at_once)} with {count} "
        f"micro-batches at once, {bytes_text(one_by_one)} with gradient accumulation"
    )
    if count == 1:
        return [figures]
    less = f"needs {1 - one_by_one / staggered:.0%} less" if staggered > one_by_one else "needs no more"
    return [
        f"{figures}. Gradient accumulation {less} on one device and is exact: it is the better plan, unless several "
        f"micro-batches must be in flight"
    ]


SCHEDULES.register(
    "one_device",
    Method(
        table=lambda options: cyclic(options.micro_batches, options.stages, options.slack, options.costs or None),
        options=OptionRules(
            knows=RING_OPTIONS | {"recompute", "corrections"},
            implied=_implied,
            defaults=lambda given, workers: {"micro_batches": DEFAULT_MICRO_BATCHES},
        ),
        examples=(
            {"workers": 1, "micro_batches": 3},
            {"workers": 2, "micro_batches": 2, "stages": 4, "slack": 1},
            {"workers": 1, "micro_batches": 3, "costs": [[1, 2], [2, 5], [1, 1]]},
        ),
        placement=Placing(DATA),
        replicates_table=True,
        notes=_notes,
    ),
)
