"""How many bytes of activations a schedule's table keeps at its peak, and the pace at which shared devices work.

Counted in the steady state, where steps overlap as the table says.

What a worker holds of the weights of stages that are lent, and of gradients on their way, counted on its list.

A tensor counts from the instruction that makes it, or makes room for it, to the one that lets go of it. What is
counted is what the interpreter holds, action by action, in a step in the midst of several.

How many copies of a stage's weights a worker holds under schedules whose stages stay with one process.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from armillary.schedules.clipping import Clip
from armillary.schedules.instructions import Instruction, Letter, Wires
from armillary.schedules.lower_zero_ring import TOKENS
from armillary.schedules.lowering import Lowering
from armillary.schedules.method import ScheduleOptions, StageLoad
from armillary.schedules.routes import owner_of
from armillary.schedules.schedule import Cell, Schedule

__all__ = [
    "held_copies",
    "is_stale",
    "kept_copies",
    "mean_copies",
    "mean_over_workers",
    "peak_on_one_device",
    "peak_over_workers",
    "stagger",
]

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


def is_stale(options: ScheduleOptions, stage: int) -> bool:
    """Whether some micro-batch reads old weights of the stage, so that an older version is kept."""
    return any(ages[stage] for ages in options.schedule().staleness)


def kept_copies(options: ScheduleOptions, stage: int, workers: int, slots: float) -> float:
    """Weight, gradient, optimizer state; where read an older version, and what corrections remember."""
    stale = is_stale(options, stage)
    return 2 + stale + slots + sum(correction.copies for correction in options.built_corrections()) * stale


def mean_over_workers(options: ScheduleOptions, stage: int, workers: int, slots: float) -> float:
    """The same where one worker of all holds the stage."""
    return kept_copies(options, stage, workers, slots) / workers


def peak_on_one_device(schedule: Schedule, stages: Sequence[StageLoad]) -> int:
    """Bytes of activations held at most in the steady state when one device does it all, one action after the other."""
    return max(_bytes(schedule.held_after(tick), stages) for tick in _steady(schedule))


def peak_over_workers(schedule: Schedule, stages: Sequence[StageLoad], only: int | None = None) -> int:
    """The same with workers side by side: of all of them together, or of `only` one. With what their stages remember of
    samples, which stays with a worker."""

    def mine(tick: int) -> set[Cell]:
        held = schedule.held(tick)
        return {place for place in held if only is None or schedule.worker_of(place[1], place[2]) == only}

    kept = [j for j in range(len(stages)) if only is None or schedule.worker_of(0, j) == only]
    remembered = sum(stages[j].cache_bytes for j in kept)
    return remembered + max(_bytes(mine(tick), stages) for tick in _steady(schedule))


def stagger(stages: Sequence[float]) -> float:
    """Time from one micro-batch to the next on shared devices, from those of a forward and backward of each stage.

    A device keeps a micro-batch until it comes back from all stages above, and stage j of K has K - j devices to take
    turns: the slowest such tail sets the pace.
    """
    return max(sum(stages[j:]) / (len(stages) - j) for j in range(len(stages)))


def _steady(schedule: Schedule) -> range:
    return range(2 * schedule.period, 4 * schedule.period)


def _bytes(held: Iterable[Cell], stages: Sequence[StageLoad]) -> int:
    return sum(stages[stage].activation_bytes for _, _, stage in held)
