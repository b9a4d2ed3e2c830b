"""What the look-ups of a few steps asked for, kept as it came: nothing is computed until somebody measures.

A look-up has found its distinct rows anyway. One step in `EVERY_STEPS` they are kept instead of dropped, of the last
`KEPT_STEPS` such steps: two references a look-up, no work, no message and no wait for a device.
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ["EVERY_STEPS", "KEPT_STEPS", "AskedRows", "RowSamples"]

EVERY_STEPS = 10
KEPT_STEPS = 4
MOST_LOOK_UPS = 256  # of a table in one step; more are forwards that nobody steps on


class AskedRows(NamedTuple):
    """One look-up. keys: (distinct,) sorted, by the owners of its time; inverse: for each id its place among them."""

    keys: Tensor
    inverse: Tensor


class RowSamples:
    """Of one rank. steps: step -> table -> its look-ups, oldest step first."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, list[AskedRows]]] = {}

    def take(self, step: int, table: str, keys: Tensor, inverse: Tensor) -> None:
        """A look-up that is learned from was made."""
        if step % EVERY_STEPS:
            return
        asked = self.steps.setdefault(step, {}).setdefault(table, [])
        if len(asked) < MOST_LOOK_UPS:
            asked.append(AskedRows(keys, inverse))
        if len(self.steps) > KEPT_STEPS:
            del self.steps[next(iter(self.steps))]

    def forget(self) -> None:
        self.steps.clear()
