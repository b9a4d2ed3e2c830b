"""One cell block of a schedule: the forward or backward of one stage on one micro-batch, at a tick.

Ticks are the events of a schedule in the order of time: where all stages cost the same they are equal slots,
elsewhere a tick lasts until the next event and an action may fill several.

Source: the word `_Action` of torch.distributed.pipelining, which prints and parses back.
"""

from typing import Literal, NamedTuple

__all__ = ["Action", "Kind", "Row", "Staleness", "one_pass"]

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """`start` and `ticks` are those of step 0; step t does the same t periods later."""

    start: int
    ticks: int
    kind: Kind
    stage: int
    micro_batch: int

    @property
    def end(self) -> int:
        """The first tick at which the result is there."""
        return self.start + self.ticks


Row = tuple[Action, ...]  # what one worker does for one step, in order of time
Staleness = tuple[tuple[int, ...], ...]  # [micro_batch][stage], in steps


def one_pass(micro_batch: int, stages: int, start: int) -> Row:
    """All forwards, then all backwards of one micro-batch, a tick each."""
    forwards = [Action(start + stage, 1, "F", stage, micro_batch) for stage in range(stages)]
    backwards = [Action(start + 2 * stages - 1 - stage, 1, "B", stage, micro_batch) for stage in range(stages)]
    return tuple(sorted(forwards + backwards))
