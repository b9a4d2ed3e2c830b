"""Runs several modes by turns inside one job and records what each step took.

    round 0:  A A A A | B B B B | C C C C      warm steps, then timed ones; a barrier at each bar
    round 1:  B B B B | C C C C | A A A A      another mode first, so that none always follows the same one
    round 2:  C ...

One after the other, modes would each meet another state of the machine. In one process they share its
state, its allocator and its connections; what remains different is what is measured. Every rank calls
`interleave` with the same modes in the same order, inside a lab: outside there are no bytes to count.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist

from benchmarks.measuring.memory import begin_watch, peak_bytes, pss_bytes, return_freed_memory
from benchmarks.measuring.record import Block
from benchmarks.netlab import counted_bytes

Step = Callable[[], float]
Factory = Callable[[], Step]
Lend = Callable[[str], AbstractContextManager["Built"]]


@dataclass(frozen=True)
class Rounds:
    """How often each mode has its turn, and how many steps a turn has."""

    rounds: int = 3
    warm_steps: int = 2
    timed_steps: int = 6
    first_steps: int = 0  # of every mode, before all rounds: where modes learn from their steps and stay alive

    def __post_init__(self) -> None:
        if self.rounds < 1 or min(self.warm_steps, self.first_steps) < 0 or self.timed_steps < 1:
            raise ValueError(f"measure: want rounds and timed_steps >= 1, warm_steps and first_steps >= 0, got {self}")


@dataclass
class Built:
    """A mode that exists: its step, and the memory that is its own between turns."""

    step: Step
    held_bytes: int


@dataclass(frozen=True)
class Turn:
    """What one rank saw of one block; totals over the timed steps."""

    step_seconds: tuple[float, ...]
    wall_seconds: float
    cpu_seconds: float
    sent_bytes: int
    received_bytes: int
    peak_bytes: int
    loss: float
    sent_payload_bytes: int


def interleave(factories: Mapping[str, Factory], rounds: Rounds, lend: Lend) -> tuple[Block, ...]:
    """Gives every mode its turn in every round. All ranks get the same blocks.

    Args:
        factories: builds a mode and returns its step, which returns the loss.
        rounds: how many turns of how many steps.
        lend: hands out a built mode by name: `all_alive(factories)` or `one_at_a_time(factories)`.
    """
    names = list(factories)
    blocks = []
    for name in names if rounds.first_steps else ():
        with lend(name) as built:
            for _ in range(rounds.first_steps):
                built.step()
    for index in range(rounds.rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            with lend(name) as built:
                turn = _turn(built, rounds)
            blocks.append(_gather(name, index, turn, rounds.timed_steps))
    return tuple(blocks)


def rehearse(factories: Mapping[str, Factory], steps: int = 2) -> None:
    """Builds every mode, takes some steps and drops it; call it once, before `lend`, with the modes in a small size.

    The first optimizer of a process imports 70 MB of code, the first exchange opens connections: this way
    neither is put down to the mode that happens to come first.
    """
    lend = one_at_a_time(factories)
    for name in factories:
        with lend(name) as built:
            for _ in range(steps):
                built.step()


def all_alive(factories: Mapping[str, Factory]) -> Lend:
    """Builds every mode now and keeps it: the rule where the memory allows, as nothing is rebuilt between turns."""
    return_freed_memory()
    alive = {name: _build(factory) for name, factory in factories.items()}

    @contextmanager
    def lend(name: str) -> Iterator[Built]:
        yield alive[name]

    return lend


def one_at_a_time(factories: Mapping[str, Factory]) -> Lend:
    """Builds a mode for its turn and drops it after: for models of which only one fits. Training starts anew."""
    return_freed_memory()

    @contextmanager
    def lend(name: str) -> Iterator[Built]:
        built = _build(factories[name])
        try:
            yield built
        finally:
            built.step = _dropped  # whoever still holds `built` must not hold the model
            return_freed_memory()

    return lend


def _build(factory: Factory) -> Built:
    before = pss_bytes()
    step = factory()
    return_freed_memory()  # what start-up needed for a moment
    return Built(step, max(0, pss_bytes() - before))


def _dropped() -> float:
    raise RuntimeError("measure: this mode was dropped after its turn; ask for it again")


def _turn(built: Built, rounds: Rounds) -> Turn:
    return_freed_memory()  # else what the last mode freed would be reused by this one, and not be counted
    level = begin_watch()
    for _ in range(rounds.warm_steps):
        built.step()
    dist.barrier()
    counted, cpu, begun = counted_bytes(), time.process_time(), time.perf_counter()
    marks = [begun]
    for _ in range(rounds.timed_steps):
        loss = built.step()
        marks.append(time.perf_counter())
    cpu = time.process_time() - cpu
    dist.barrier()
    wall = time.perf_counter() - begun
    crossed = counted_bytes() - counted
    peak = built.held_bytes + peak_bytes(level) - level.pss_bytes
    return_freed_memory()
    built.held_bytes += pss_bytes() - level.pss_bytes  # an optimizer's state comes with the first step
    return Turn(
        step_seconds=tuple(after - before for before, after in pairwise(marks)),
        wall_seconds=wall,
        cpu_seconds=cpu,
        sent_bytes=crossed.sent_bytes,
        received_bytes=crossed.received_bytes,
        peak_bytes=peak,
        loss=loss,
        sent_payload_bytes=crossed.sent_payload_bytes,
    )


def _gather(mode: str, index: int, turn: Turn, steps: int) -> Block:
    """One block from the turns of all ranks; a host's bytes are those its first rank read."""
    turns: list[Turn] = [turn] * dist.get_world_size()
    dist.all_gather_object(turns, turn)
    of_hosts = turns[:: int(os.environ["LOCAL_WORLD_SIZE"])]
    return Block(
        mode=mode,
        round=index,
        step_seconds=turns[0].step_seconds,
        wall_seconds=max(one.wall_seconds for one in turns) / steps,
        cpu_seconds=sum(one.cpu_seconds for one in turns) / len(turns) / steps,
        sent_bytes=tuple(one.sent_bytes / steps for one in of_hosts),
        received_bytes=tuple(one.received_bytes / steps for one in of_hosts),
        peak_bytes=max(one.peak_bytes for one in turns),
        loss=turns[0].loss,
        sent_payload_bytes=tuple(one.sent_payload_bytes / steps for one in of_hosts),
    )
