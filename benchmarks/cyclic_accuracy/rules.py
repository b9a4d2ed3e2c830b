"""The update rules that are compared: which weights a gradient is taken at, and what is done about their age.

Delayed all-reduce is not among them: its rule is v1's, weights one step old everywhere; `same.py` says so bit by bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from armillary.schedules import Correction, Schedule, build_correction
from armillary.schedules.cyclic import cyclic
from armillary.schedules.simultaneous import simultaneous

__all__ = ["PLAIN", "WORKERS", "Costs", "Rule", "rules_of"]

WORKERS = 4

Costs = Sequence[tuple[float, float]]  # per stage: forward, backward; only ratios matter


@dataclass(frozen=True)
class Rule:
    """
    Args:
        slack: of the cyclic schedule; None: no delay at all (data parallelism).
        corrections: for stages that read old weights, by name.
        is_nesterov: whether the optimizer itself looks ahead (SGD with nesterov=True; NAdam for AdamW).
        clock: the mode of the timing job whose seconds a step takes.
    """

    slack: int | None
    clock: str
    corrections: tuple[str, ...] = ()
    is_nesterov: bool = False

    def schedule(self, costs: Costs) -> Schedule:
        if self.slack is None:
            return simultaneous(WORKERS, len(costs))
        return cyclic(WORKERS, slack=self.slack, costs=costs)

    def built_corrections(self) -> tuple[Correction, ...]:
        return tuple(build_correction(name) for name in self.corrections)


PLAIN = {
    "dp": Rule(None, "ddp"),
    "v1": Rule(WORKERS, "ring_v1"),
    "v2": Rule(0, "ring_slack0"),
    "slack1": Rule(1, "ring_slack1"),
}
REMEDIED = {
    "v1_weight_prediction": Rule(WORKERS, "ring_v1", ("weight_prediction",)),
    "v1_error_feedback": Rule(WORKERS, "ring_v1", ("error_feedback",)),
    "slack1_stable_rate": Rule(1, "ring_slack1", ("stable_rate",)),
}
LOOKING_AHEAD = {
    "vision": {
        "dp_nesterov": Rule(None, "ddp", is_nesterov=True),
        "v1_nesterov": Rule(WORKERS, "ring_v1", ("nesterov",)),
    },
    "language_model": {  # the correction is for SGD; for Adam its own text says: take NAdam
        "dp_nadam": Rule(None, "ddp", is_nesterov=True),
        "v1_nadam": Rule(WORKERS, "ring_v1", is_nesterov=True),
    },
}


def rules_of(task: str) -> Mapping[str, Rule]:
    """By name, the plain ones first."""
    return {**PLAIN, **LOOKING_AHEAD[task], **REMEDIED}
