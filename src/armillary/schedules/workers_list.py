"""What workers of a schedule do with letters, as far as it concerns the rank whose list is written."""

from collections.abc import Sequence

from armillary.schedules.instruction import Instruction, Letter, Op
from armillary.schedules.rank_list import RankList

__all__ = ["WorkersList"]


class WorkersList:
    """
    Args:
        ranks: by worker of the schedule.
    """

    def __init__(self, ranks: Sequence[int], written: RankList) -> None:
        self._ranks, self._written = ranks, written

    def is_here(self, worker: int) -> bool:
        return self._ranks[worker] == self._written.rank

    def does(self, worker: int, instruction: Instruction) -> None:
        """Something by itself."""
        if self.is_here(worker):
            self._written.add(instruction)

    def takes(self, op: Op, worker: int, tick: int, letter: Letter, sender: int) -> None:
        """Something with a letter that has come."""
        place = letter.step, letter.micro_batch, letter.stage
        self.does(worker, Instruction(op, tick, *place, letter, self._ranks[sender]))
        self._written.reads(letter, self._ranks[sender], self._ranks[worker], tick)

    def passes(self, letter: Letter, sender: int, receiver: int, tick: int) -> None:
        self._written.passes(letter, self._ranks[sender], self._ranks[receiver], tick)
