"""Plays one step of a chain of stages on three lanes (compute, write, read), and counts the bytes there by time.

The planner's sums are an approximation of this; what a plan promises is what this says. It shares no formula with the
planner: transfers start as early as the rules of the runtime let them, and bytes are there from one moment to another.

Source: the lanes are those of KARMA (Wahib et al., SC20) and POFO (Beaumont et al., NeurIPS 2021), reconstructed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from armillary.residency.stage_costs import KEEP, RECOMPUTE, SWAP, StageChain, TierSpeed

__all__ = ["Played", "play"]


@dataclass(frozen=True)
class Played:
    """One step.

    Args of note:
        peak_bytes: the most bytes there at once, if transfers take as long as said.
        bound_bytes: the most there can be, however long transfers take: what is written counts until the pass that
            waits for it, what is read from the moment it may be asked for. This is what a budget is held against.
        moved_bytes: both ways together.
    """

    seconds: float
    peak_bytes: int
    bound_bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class _There:
    """Bytes that are there from one moment until another."""

    begins: float
    ends: float
    nbytes: int


def play(chain: StageChain, residencies: Sequence[str], slots: int, speed: TierSpeed) -> Played:
    """
    Args:
        residencies: "keep", "recompute" or "swap", a stage each. slots: how many stages may lie between the one that
            computes and the last one whose bytes are still being written, or are read ahead; 1 reads nothing ahead.
    """
    stages, outside, count = chain.stages, chain.outside, len(chain.stages)
    swapped = [one == SWAP for one in residencies]
    copying = [
        speed.processor_seconds_per_byte * stage.moved_bytes * is_swapped
        for stage, is_swapped in zip(stages, swapped, strict=True)
    ]
    begins, leaves, written = [0.0] * (count + 1), [0.0] * (count + 1), [0.0] * count
    now = write_lane = 0.0
    for i, stage in enumerate((*stages, outside)):
        if i > slots and swapped[i - slots - 1]:
            now = max(now, written[i - slots - 1])
        begins[i] = now
        now += stage.forward_seconds + (copying[i] if i < count else 0.0)
        leaves[i] = now
        if i < count and swapped[i]:
            write_lane = max(write_lane, now) + stage.moved_bytes / speed.write_bytes_per_second
            written[i] = write_lane
    read_begins, starts, ends = [0.0] * count, [0.0] * count, [0.0] * (count + 1)
    ends[count] = now = now + outside.backward_seconds
    read_lane = 0.0
    for i in reversed(range(count)):
        stage = stages[i]
        if swapped[i]:
            read_begins[i] = max(read_lane, written[i], ends[i + slots] if i + slots <= count else 0.0)
            read_lane = read_begins[i] + stage.moved_bytes / speed.read_bytes_per_second
            now = max(now, read_lane)
        starts[i] = now
        now += stage.backward_seconds + copying[i] + (stage.forward_seconds if residencies[i] == RECOMPUTE else 0.0)
        ends[i] = now

    there, as_played, at_worst = [_There(0.0, now, chain.fixed_bytes)], [], []
    there.append(_There(begins[count], leaves[count], outside.saved_bytes + outside.forward_extra_bytes))
    there.append(_There(leaves[count], ends[count], outside.saved_bytes + outside.backward_extra_bytes))
    there.append(_There(begins[count - 1], ends[count], outside.input_bytes))
    for i, stage in enumerate(stages):
        there.append(_There(begins[i - 1] if i else 0.0, ends[i], stage.input_bytes))
        # The gradient of its output is there from the backward before on, also while this one waits for a read.
        output_bytes = stages[i + 1].input_bytes if i + 1 < count else outside.input_bytes
        there.append(_There(ends[i + 1], ends[i], output_bytes))
        there.append(_There(starts[i], ends[i], stage.backward_extra_bytes))
        there.append(_There(0.0 if chain.keeps_gradients else starts[i], now, stage.gradient_bytes))
        if residencies[i] == RECOMPUTE:
            there.append(_There(begins[i], leaves[i], stage.unsaved_forward_bytes))
            second = max(stage.forward_extra_bytes - stage.backward_extra_bytes, 0)
            there.append(_There(starts[i], ends[i], stage.saved_bytes + second))
            continue
        there.append(_There(begins[i], leaves[i], stage.forward_extra_bytes))
        if residencies[i] == KEEP:
            there.append(_There(begins[i], ends[i], stage.saved_bytes))
            continue
        there.append(_There(begins[i], ends[i], stage.small_bytes))
        as_played += _gone_between(begins[i], written[i], read_begins[i], ends[i], stage.moved_bytes)
        is_waited_for = i + slots + 1 <= count
        until = begins[i + slots + 1] if is_waited_for else ends[i]
        since = ends[i + slots] if i + slots <= count else ends[i]
        at_worst += _gone_between(begins[i], until, since, ends[i], stage.moved_bytes)
    moved = 2 * sum(stage.moved_bytes for stage, is_swapped in zip(stages, swapped, strict=True) if is_swapped)
    return Played(now, _most([*there, *as_played]), _most([*there, *at_worst]), moved)


def _gone_between(begins: float, written: float, read: float, ends: float, nbytes: int) -> list[_There]:
    """Bytes that leave once they are written and come back from the moment they are read."""
    if read <= written:
        return [_There(begins, ends, nbytes)]
    return [_There(begins, written, nbytes), _There(read, ends, nbytes)]


def _most(there: Sequence[_There]) -> int:
    """The most bytes at one moment. What ends as another begins is gone before."""
    changes = [(one.begins, 1, one.nbytes) for one in there if one.ends > one.begins]
    changes += [(one.ends, 0, -one.nbytes) for one in there if one.ends > one.begins]
    now = most = 0
    for _, _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
