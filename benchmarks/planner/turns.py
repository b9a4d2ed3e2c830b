"""Times plans by turns for as long as it is told: those that may be the best most often.

A turn is short, and what is compared takes turns next to one another, so that a machine whose speed drifts cannot
choose the winner. What took far longer than the best in the first round and once more is not timed again.
"""

import time
from collections.abc import Mapping

import torch.distributed as dist

from benchmarks.measuring.measure import Lend

__all__ = ["ALONE", "by_turns"]

ALONE = "alone"  # computes and exchanges nothing: not training, but it tells a wrong compute time from wrong links
FAR = 1.6  # times the best: no noise makes up for it twice
WARM_STEPS, TIMED_STEPS = 1, 4
FEWEST_ROUNDS, MOST_ROUNDS = 4, 16


def by_turns(
    lend: Lend, seconds: Mapping[str, float], always: set[str], budget_seconds: float
) -> dict[str, list[float]]:
    """Seconds a step, one a turn, of every plan that is near the best; of all ranks, from barrier to barrier.

    Args:
        seconds: of a step of each plan in the first round, the same on every rank.
        always: plans that are timed however long they took.
    """
    best = min(spent for name, spent in seconds.items() if name != ALONE)
    near = [name for name in seconds if name in always or _is_near(lend, name, seconds[name], FAR * best)]
    round_seconds = sum(seconds[name] for name in near) * (WARM_STEPS + TIMED_STEPS)
    rounds = min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(budget_seconds / round_seconds)))
    found: dict[str, list[float]] = {name: [] for name in near}
    for index in range(rounds):
        first = index % len(near)
        order = near[first:] + near[:first]
        for name in order if index % 2 else reversed(order):
            found[name].append(_turn(lend, name))
    return found


def _is_near(lend: Lend, name: str, spent: float, limit: float) -> bool:
    """At once or in another turn; the answer is rank 0's."""
    answer = [spent <= limit or _turn(lend, name) <= limit]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _turn(lend: Lend, name: str) -> float:
    with lend(name) as built:
        for _ in range(WARM_STEPS):
            built.step()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(TIMED_STEPS):
            built.step()
        dist.barrier()
        return (time.perf_counter() - began) / TIMED_STEPS
