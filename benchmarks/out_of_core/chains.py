"""One cell: the planner on random chains, beside every choice there is, and beside a bound of its own for long chains.

The bound shares no code with the planner: a small linear program over shares of stages, which asks less than the
runtime does, so it lies at or below the best there is.
"""

import argparse
import itertools
import json
import random
import time
from dataclasses import replace

import numpy
from scipy.optimize import linprog

from armillary.residency.lanes import play
from armillary.residency.planner import search
from armillary.residency.stage_costs import StageChain, StageCost, TierSpeed
from benchmarks.measuring.record import machine

SLOTS = (1, 2, 3)
WORDS = ("keep", "recompute", "swap")


class Case:
    """A chain, a tier of 0.2, 0.7 or 2 times its bytes a forward second, and a budget of 0.3 to 0.7 of its bytes."""

    def __init__(self, seed: int, count: int, is_identical: bool = False) -> None:
        draw = random.Random(seed)
        stages = [_stage(draw) for _ in range(count)]
        if is_identical:
            stages = stages[:1] * count
        stages = [replace(one, path=str(number)) for number, one in enumerate(stages)]
        outside = StageCost("", 0.3, 0.3, 200, 100, 0, 50, 50, 50)
        self.chain = StageChain(tuple(stages), outside, 100, draw.random() < 0.3)
        saved = sum(one.saved_bytes for one in stages)
        rate = saved / sum(one.forward_seconds for one in stages) * draw.choice((0.2, 0.7, 2.0))
        self.speed = TierSpeed(rate, rate * draw.choice((0.8, 1.0)), draw.choice((0.0, 0.1)) / rate)
        gradients = sum(one.gradient_bytes for one in stages) if self.chain.keeps_gradients else 0
        inputs = sum(one.input_bytes for one in stages)
        self.memory_bytes = self.chain.fixed_bytes + gradients + inputs + draw.uniform(0.3, 0.7) * saved


def _stage(draw: random.Random) -> StageCost:
    forward, saved = draw.uniform(0.5, 2), draw.randint(300, 3000)
    ends = ((0.05, 0.5), (0, 0.1), (0.1, 0.6), (0.2, 0.9), (0.1, 0.6))
    given, small, ahead, unsaved, back = (int(draw.uniform(*two) * saved) for two in ends)
    return StageCost("", forward, 2 * forward, given, saved, small, ahead, unsaved, back, draw.randint(0, 200))


def beside_every_choice(seed: int) -> list[float] | None:
    """Seconds of the plan, and of the best of all choices that fit; None where nothing fits."""
    case = Case(seed, 7)
    fits = [
        played.seconds
        for slots in SLOTS
        for words in itertools.product(WORDS, repeat=7)
        if (played := play(case.chain, words, slots, case.speed)).bound_bytes <= case.memory_bytes
    ]
    if not fits:
        try:
            search(case.chain, case.memory_bytes, case.speed, {})
        except ValueError:
            return None
        raise AssertionError(f"chain {seed}: a plan where nothing fits")
    played = search(case.chain, case.memory_bytes, case.speed, {}).played
    assert played.bound_bytes <= case.memory_bytes, f"chain {seed}: the plan does not fit"
    return [played.seconds, min(fits)]


def bound_seconds(case: Case, slots: int) -> float:
    """No choice of these slots that fits takes fewer: the least of a linear program over shares of stages.

    A stage's write lies between its forward and the one `slots` + 1 later, its read between the backward `slots` before
    and its own. Such spans do not overlap for stages `slots` + 1 (`slots`) apart, so what they lack adds up.
    """
    stages, outside, speed, n = case.chain.stages, case.chain.outside, case.speed, len(case.chain.stages)
    moved, saved = (numpy.array([getattr(one, of) for one in stages]) for of in ("moved_bytes", "saved_bytes"))
    ahead = numpy.array([one.forward_seconds for one in stages])
    back = numpy.array([one.backward_seconds for one in stages])
    copying = speed.processor_seconds_per_byte * moved
    write, read = moved / speed.write_bytes_per_second, moved / speed.read_bytes_per_second
    number, none = numpy.arange(n), numpy.zeros(n)
    rows: list[numpy.ndarray] = []  # of swapped shares, recomputed shares, seconds of forward, seconds of backward
    least: list[float] = []

    def forward_takes(seconds: float, swapped: numpy.ndarray) -> None:
        rows.append(numpy.concatenate([-swapped, none, [1, 0]]))
        least.append(seconds)

    def backward_takes(seconds: float, swapped: numpy.ndarray, again: numpy.ndarray) -> None:
        rows.append(numpy.concatenate([-swapped, -again, [0, 1]]))
        least.append(seconds)

    waited = number <= n - slots - 1
    lacks = [max(0.0, write[j] - (ahead + copying)[j + 1 : j + slots + 1].sum()) * waited[j] for j in number]
    for first in range(slots + 1):
        forward_takes(ahead.sum(), copying + lacks * (number % (slots + 1) == first))
    forward_takes(ahead[0], write * waited)
    is_after = number <= n - slots
    lacks = [max(0.0, read[j] - (ahead + back + copying)[j + 1 : j + slots].sum()) * is_after[j] for j in number]
    for first in range(slots):
        backward_takes(back.sum(), copying + lacks * (number % slots == first), ahead)
    backward_takes(back[-1] + back[0], read * is_after, none)

    always = case.chain.fixed_bytes + outside.input_bytes + outside.saved_bytes
    always += max(outside.forward_extra_bytes, outside.backward_extra_bytes) + sum(one.input_bytes for one in stages)
    always += sum(one.gradient_bytes for one in stages) if case.chain.keeps_gradients else 0
    rows.append(numpy.concatenate([moved * waited, saved, [0, 0]]))  # as the pass outside the stages begins
    least.append(always + saved.sum() - case.memory_bytes)
    for j in number:
        rows.append(numpy.concatenate([-(number == j).astype(float), -(number == j).astype(float), [0, 0]]))
        least.append(-1.0)
    cost = numpy.concatenate([none, none, [1, 1]])
    answer = linprog(cost, -numpy.array(rows), -numpy.array(least), method="highs")
    return float(answer.fun) + outside.forward_seconds + outside.backward_seconds


def of_long_chain(seed: int, count: int, is_identical: bool) -> dict[str, float | str] | None:
    case = Case(seed, count, is_identical)
    began = time.perf_counter()
    try:
        found = search(case.chain, case.memory_bytes, case.speed, {})
    except ValueError:
        return None
    took = time.perf_counter() - began
    bound = min(bound_seconds(case, slots) for slots in SLOTS)
    return {
        "stages": "identical" if is_identical else "unequal",
        "took": took,
        "told": found.gap,
        "above": found.played.seconds / bound - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    short, long, count = (1, 1, 8) if options.small else (50, 5, 32)
    beside = [beside_every_choice(seed) for seed in range(short)]
    longer = [of_long_chain(seed, count, kind) for kind in (False, True) for seed in range(long)]
    print(json.dumps({"beside": beside, "long": [one for one in longer if one], "machine": machine()}))


if __name__ == "__main__":
    main()
