"""What this page is to show: how much shorter a step is at 100 Mbit/s, at what loss; nothing helps on loopback.

Steps are compared in paired rounds, with the better of a rival's two buckets. Points are hundredths of accuracy at the
end, mean of the seeds; of thresholds after the longer training.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.lossy.contenders import EXACT, OURS
from benchmarks.measuring.bars import Bar
from benchmarks.measuring.ratios import over_best, over_each

__all__ = ["FP16", "PLAIN", "bars_of", "by_contender", "times_faster"]

PLAIN, FP16 = ("ddp_25mb", "ddp_2mb"), ("ddp_fp16_25mb", "ddp_fp16_2mb")
SLOW, LOOPBACK = 100.0, 0.0
THRESHOLDS = ("threshold", "threshold_98", "threshold_97")
AT_LEAST = {**dict.fromkeys(THRESHOLDS, (5.0, 2.5, 0.3)), "int8": (2.5, 1.4, 0.2)}  # times DDP, its hook; points lost
ENDED = THRESHOLDS  # judged by the training that was ended: what waits in residuals arrives late
SAME_POINTS = 0.3  # a rank of factors is another training than the hook's; this near they are the same
HELPS = 1.15  # times the exact step; what is less a plan calls no help


def by_contender(found: Mapping[str, Any], key: str) -> dict[str, list[float]]:
    """One a round."""
    numbers: dict[str, list[float]] = {}
    for turn in sorted(found["turns"], key=lambda turn: turn["round"]):
        numbers.setdefault(turn["mode"], []).append(turn[key])
    return numbers


def times_faster(found: Mapping[str, Any], one: str, rivals: Sequence[str]) -> float:
    """Than the best of the rivals, median of the rounds."""
    return statistics.median(over_best(over_each(by_contender(found, "step_seconds"), one, rivals))[1])


def bars_of(
    timed: Mapping[float, Mapping[str, Any]], ends: Mapping[str, float], ended: Mapping[str, float]
) -> list[Bar]:
    """
    Args:
        timed: the cells of seconds that there are, by Mbit/s.
        ends: accuracy at the end, by contender, of those that were trained.
        ended: the same of the longer training, in which the learning rate falls to 0.
    """
    found = []
    for one, (over_ddp, over_hook, points) in AT_LEAST.items():
        for rivals, said, least in ((PLAIN, "DDP", over_ddp), (FP16, "its fp16 hook", over_hook)):
            figures = [times_faster(timed[SLOW], one, rivals)] if SLOW in timed else []
            says = f"100 Mbit/s: steps of {one}, times as fast as {said}"
            found.append(Bar(says, f"{least} or more", figures, lambda times, least=least: times >= least))
        judged, when = (ended, ", trained to the end") if one in ENDED else (ends, "")
        lost = [100 * (judged[EXACT] - judged[one])] if {EXACT, one} <= set(judged) else []
        says = f"points that {one} loses beside exact training{when}"
        found.append(Bar(says, f"{points} or less", lost, lambda lost, most=points: lost <= most))
    hook = "ddp_powersgd"
    figures = [times_faster(timed[SLOW], "low_rank", [hook])] if SLOW in timed else []
    says = "100 Mbit/s: steps of low_rank, times as fast as torch's PowerSGD hook of its rank"
    found.append(Bar(says, "1 or more", figures, lambda times: times >= 1))
    lost = [100 * (ends[hook] - ends["low_rank"])] if {hook, "low_rank"} <= set(ends) else []
    says = "points that low_rank loses beside that hook"
    found.append(Bar(says, f"{SAME_POINTS} or less", lost, lambda lost: lost <= SAME_POINTS))
    return [*found, *_loopback(timed)]


def _loopback(timed: Mapping[float, Mapping[str, Any]]) -> list[Bar]:
    there = timed.get(LOOPBACK)
    says = "no limit: the plan names no lossy way (1: it names none)"
    notes = [float(not any("NOT exact" in note for note in there["notes"]))] if there else []
    best = [max(times_faster(there, one, [EXACT]) for one in OURS if one != EXACT)] if there else []
    return [
        Bar(says, "1", notes, lambda said: said == 1),
        Bar("no limit: the quickest coded steps, times as fast as exact ones", f"below {HELPS}", best,
            lambda times: times < HELPS),
    ]  # fmt: skip
