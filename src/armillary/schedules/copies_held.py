"""What a worker holds of the weights of stages that are lent, and of gradients on their way, counted on its list.

A tensor counts from the instruction that makes it, or makes room for it, to the one that lets go of it. What is
counted is what the interpreter holds, action by action, in a step in the midst of several.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache

from armillary.schedules.clipping import Clip
from armillary.schedules.instruction import Instruction, Letter
from armillary.schedules.lowering import Lowering
from armillary.schedules.messages import owner_of
from armillary.schedules.rank_list import Wires
from armillary.schedules.schedule import Schedule
from armillary.schedules.unsharded import TOKENS

__all__ = ["held_copies", "mean_copies"]

WARM = 3  # steps before the one that is counted
SUMS = ("sum", "partial gradient", "gradient")

Kept = tuple[str, int, int, int]  # what, stage, and which of them


def held_copies(schedule: Schedule, worker: int, clip: Clip | None = None) -> list[Counter[int]]:
    """Copies of each stage's weights that a worker holds during each of its 2K actions of a step, in the steady state.

    Those it owns, older versions of them, and what is lent, from the room that is made for it until it has gone.
    """
    owned = [stage for stage in range(schedule.stages) if owner_of(schedule, stage) == worker]
    return [
        Counter(owned) + Counter(stage for what, stage, *_ in held if what not in SUMS)
        for held in _held(schedule, worker, clip)
    ]


def mean_copies(schedule: Schedule, stage: int, clip: Clip | None = None) -> float:
    """Copies of a stage's weights and gradients a worker holds beside those it owns, over workers and actions."""
    held = [one for worker in range(schedule.workers) for one in _held(schedule, worker, clip)]
    return sum(kept[1] == stage for one in held for kept in one) / len(held)


@lru_cache(maxsize=512)
def _held(schedule: Schedule, worker: int, clip: Clip | None) -> tuple[frozenset[Kept], ...]:
    """What is held beside weights that are owned, during each action of a step."""
    if schedule.workers == 1:  # nothing is lent
        return (frozenset(),) * (2 * schedule.stages)
    lowering = Lowering(schedule, worker, range(schedule.workers), clip, wires=Wires(lends=True))
    whole = [one for _ in range(WARM + 2) for one in lowering.next_step()]  # some of a step comes with the next one
    return tuple(held for step, held in _Book(schedule, worker).carried_out(whole) if step == WARM)


class _Book:
    def __init__(self, schedule: Schedule, worker: int) -> None:
        self._schedule, self._worker = schedule, worker
        self._held = dict[Kept, set[str]]()  # for what each is held
        self._newest = Counter[int]()  # versions, of stages owned here
        self._kept = Counter[int]()  # the oldest that is needed

    def carried_out(self, instructions: Iterable[Instruction]) -> Iterator[tuple[int, frozenset[Kept]]]:
        """What is held during each action, with its step."""
        for one in instructions:
            if one.op in TOKENS:
                yield one.step, frozenset(self._held)
            self._carry_out(one)

    def _carry_out(self, one: Instruction) -> None:
        letter, grown = one.letter, ("sum", one.stage, one.step, 0)
        if one.op == "UPDATE":
            self._held.pop(grown, None)
            if self._kept[one.stage] <= self._newest[one.stage]:
                self._hold(("old", one.stage, self._newest[one.stage], 0), "read")
            self._newest[one.stage] += 1
        elif one.op == "RESHARD" and letter is None:
            self._kept[one.stage] = one.step + 1
            self._let_go(("old", one.stage, one.step, 0), "read")
        elif one.op == "B":
            self._hold(grown, "made")
        elif letter is None or (letter.what not in SUMS and letter.what not in TOKENS.values()):
            return
        elif one.op == "RECEIVE":
            self._hold(_kept(letter), "read")
        elif one.op == "RESHARD":
            self._let_go(_kept(letter), "read")
        elif one.op == "SUM":
            self._held.pop(_kept(letter), None)
            self._hold(grown, "made")
        elif one.op == "SEND":
            if letter.what in SUMS:
                self._held.pop(grown, None)
            self._hold(self._sent(letter), str(letter))
        elif one.op == "OVER":
            self._let_go(self._sent(letter), str(letter))

    def _sent(self, letter: Letter) -> Kept:
        """What comes from another is handed on as it is, of what is owned a copy leaves."""
        came = _kept(letter)
        if letter.what in SUMS or owner_of(self._schedule, letter.stage) != self._worker:
            return came
        return f"copy of {letter.what}", letter.stage, letter.step, letter.micro_batch

    def _hold(self, kept: Kept, until: str) -> None:
        self._held.setdefault(kept, set()).add(until)

    def _let_go(self, kept: Kept, until: str) -> None:
        left = self._held.get(kept, set())
        left.discard(until)
        if not left:
            self._held.pop(kept, None)


def _kept(letter: Letter) -> Kept:
    """What arrives by it."""
    return (letter.what, letter.stage, letter.step if letter.what in SUMS else letter.version, 0)
