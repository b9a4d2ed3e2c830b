"""Who is timed on four hosts, and on what."""

from typing import Any

from benchmarks.lossy.tasks import TASKS

__all__ = ["CONTENDERS", "LIVE", "LIVE_FROM", "LIVE_STEPS", "LIVE_WAY", "SETTLED", "WHOLE", "workload"]

WHOLE = "D-PSGD"
CONTENDERS = {
    WHOLE: "gossip(horizon=0.0)",
    "keep": "gossip(horizon=1.0)",
    "keep at 1.05": "gossip(horizon=1.05)",
    "all_reduce": "all_reduce",
}
SETTLED = 100  # passes before a contender is timed: in the first 30 all tensors go
LIVE, LIVE_WAY = "live", CONTENDERS["keep"]  # is saved at the first pass that keeps something back, and goes on
LIVE_FROM, LIVE_STEPS = 30, 12


def workload(is_small: bool) -> Any:
    """The perceptron of the page on lossy exchanges."""
    return TASKS["perceptron"].workload(is_small, "")
