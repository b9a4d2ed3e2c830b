"""Who is timed on four hosts, and on what."""

from typing import Any

from benchmarks.lossy.tasks import TASKS

__all__ = ["CONTENDERS", "LIVE", "LIVE_STEPS", "SETTLED", "WHOLE", "workload"]

WHOLE = "D-PSGD"
CONTENDERS = {
    WHOLE: "gossip(horizon=0.0)",
    "keep": "gossip(horizon=1.0)",
    "keep at 1.05": "gossip(horizon=1.05)",
    "all_reduce": "all_reduce",
}
SETTLED = 100  # passes before a contender is timed: in the first 30 all tensors go
LIVE, LIVE_STEPS = "gossip(horizon=1.0, start=4)", 14  # is trained from the beginning


def workload(is_small: bool) -> Any:
    """The perceptron of the page on lossy exchanges."""
    return TASKS["perceptron"].workload(is_small, "")
