"""What a schedule is: a table of what runs when on which worker, with weights of which age; it checks itself.

Runtime, reference and simulator read the same table, so an order exists once. N workers, K stages and M
micro-batches per step are three numbers: data-parallel schedules have M = N (one micro-batch a worker),
pipelines N = K.

Source: cyclic data parallelism (Fournier & Oyallon, 2024); a table that refuses to be wrong is diffrax's
tableau.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from armillary.schedules import picture
from armillary.schedules.action import Action, Row, Staleness
from armillary.schedules.checks import flaw

__all__ = [
    "Cell",
    "Schedule",
]

Cell = tuple[int, int, int]  # (step, micro_batch, stage)


@dataclass(frozen=True)
class Schedule:
    """One step of every worker; step t is the same t periods later, and steps overlap.

    Args:
        ticks: per worker its actions of step 0, in order of time.
        staleness: [micro_batch][stage], how many steps old the weights are that it reads, forward and
            backward.
        period: ticks from one step to the next.
        uncoupled: stages that get no gradient from the next one: they learn from a loss of their own.

    Raises:
        ValueError: the table cannot be carried out; the message shows it with the guilty line marked.
    """

    name: str
    period: int
    ticks: tuple[Row, ...]
    staleness: Staleness
    uncoupled: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ticks or not self.staleness or not self.staleness[0] or self.period < 1:
            raise ValueError(f"schedule: {self.name} wants a worker, a stage, a micro-batch and a period of 1 or more")
        if len({len(ages) for ages in self.staleness}) > 1:
            raise ValueError(f"schedule: {self.name} has micro-batches with different numbers of stages")
        found = flaw(self.ticks, self.staleness, self.period, self.uncoupled)
        if found is not None:
            drawn = picture.draw(self._drawn, guilty=found[0])
            raise ValueError(f"schedule: worker {found[0]}: {found[1]}\n{drawn}")

    def __str__(self) -> str:
        return picture.draw(self._drawn)

    @property
    def _drawn(self) -> picture.Table:
        return self.name, self.period, self.ticks, self.staleness, self.uncoupled

    @property
    def workers(self) -> int:
        return len(self.ticks)

    @property
    def stages(self) -> int:
        return len(self.staleness[0])

    @property
    def micro_batches(self) -> int:
        return len(self.staleness)

    @property
    def stale_share(self) -> float:
        """Share of the (micro-batch, stage) pairs that read weights older than the newest."""
        return sum(age > 0 for ages in self.staleness for age in ages) / (self.micro_batches * self.stages)

    @property
    def overlaps(self) -> bool:
        """Whether steps overlap: a step may be over only in a later call than the one that hands it in."""
        return bool(self.stale_share or self.uncoupled)

    def version(self, place: Cell, drains: Collection[int] = ()) -> int:
        """Which weights a place reads: those that `version` optimizer steps have made.

        A drain before step d lets everything of the steps before it finish, so that step d starts as step 0
        does: nothing older than version d is read from there on.
        """
        step, micro_batch, stage = place
        floor = max((drain for drain in drains if drain <= step), default=0)
        return max(step - self.staleness[micro_batch][stage], floor)

    def worker_of(self, micro_batch: int, stage: int) -> int:
        """The worker that runs this stage for this micro-batch, both ways."""
        if (micro_batch, stage) not in self._workers:
            raise KeyError(f"schedule: {self.name} has no micro-batch {micro_batch}, stage {stage}")
        return self._workers[micro_batch, stage]

    def action(self, kind: str, micro_batch: int, stage: int) -> Action:
        """The action of step 0 that is the `kind` ("F" or "B") of this stage for this micro-batch."""
        return self._actions[kind, micro_batch, stage]

    @cached_property
    def _workers(self) -> dict[tuple[int, int], int]:
        return {(a.micro_batch, a.stage): worker for worker, row in enumerate(self.ticks) for a in row}

    @cached_property
    def _actions(self) -> dict[tuple[str, int, int], Action]:
        return {(a.kind, a.micro_batch, a.stage): a for row in self.ticks for a in row}

    def held(self, tick: int) -> set[Cell]:
        """Activations held during a tick, workers side by side: from forward to backward, both included."""
        return self._between(tick, backward_counts=True)

    def held_after(self, tick: int) -> set[Cell]:
        """Activations held after a tick when one device does it all: each action whole, backwards first."""
        return self._between(tick, backward_counts=False)

    def _between(self, tick: int, backward_counts: bool) -> set[Cell]:
        found: set[Cell] = set()
        for row in self.ticks:
            backwards = {(a.micro_batch, a.stage): a for a in row if a.kind == "B"}
            for forward in (a for a in row if a.kind == "F"):
                backward = backwards[forward.micro_batch, forward.stage]
                end = backward.end if backward_counts else backward.start
                first = max(0, (tick - end) // self.period + 1)
                last = (tick - forward.start) // self.period
                found |= {(step, forward.micro_batch, forward.stage) for step in range(first, last + 1)}
        return found
