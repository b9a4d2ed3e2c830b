"""What an owner of parameters did, in its order: pulls answered, updates made, workers that stepped aside.

The owners' logs together fix what training without a common clock computed, so one process can replay it
(`reference/replay.py`). A log is judged by itself: `faults` reads nothing else.

Source: the bound on clocks is that of stale synchronous parallel (Ho et al., 2013).
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Event", "Kind", "UpdateLog", "faults", "refused_bound", "staleness", "too_far_ahead"]


class Kind(IntEnum):
    """PULL: a worker was given values. PUSH: its gradients were stepped with. ASIDE: it takes no steps for a while; the
    others do not wait for it. Its next pull ends that."""

    PULL = 0
    PUSH = 1
    ASIDE = 2


class Event(NamedTuple):
    """step: of the worker, counted from 0. epoch, batch: which batch it was dealt, -1 of data of its own."""

    kind: Kind
    worker: int
    step: int
    epoch: int = -1
    batch: int = -1


class UpdateLog:
    """Of one owner, in its order."""

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self._numbers = array("i", [number for event in events for number in event])
        self.waited = 0  # pulls that were held back by the bound

    def append(self, event: Event) -> None:
        self._numbers.extend(event)

    def __len__(self) -> int:
        return len(self._numbers) // len(Event._fields)

    def __iter__(self) -> Iterator[Event]:
        numbers = iter(self._numbers)
        for kind, *rest in zip(*[numbers] * len(Event._fields), strict=True):
            yield Event(Kind(kind), *rest)


def refused_bound(bound: object) -> str:
    """Why it is no bound on clocks; empty if it is one."""
    is_number = isinstance(bound, int) and not isinstance(bound, bool)
    if bound is None or (is_number and bound >= 0):  # type: ignore[operator]
        return ""
    return f"bound={bound!r}; want 0 or more steps, or None, where nobody waits"


def too_far_ahead(step: int, updates: Mapping[int, int], bound: int | None) -> bool:
    """Whether a worker may not yet begin its `step`.

    Args:
        updates: how many each worker has made that has not stepped aside, the one that asks among them.
    """
    return bound is not None and step - min(updates.values(), default=step) > bound


def faults(log: UpdateLog, workers: int, bound: int | None) -> list[str]:
    """What a log shows that must not be: a worker that began too far ahead of the slowest, a step that was stepped with
    twice or out of its order, a step whose values nobody had asked for. In words; none is well."""
    found = list[str]()
    updates, pulled = dict.fromkeys(range(workers), 0), dict.fromkeys(range(workers), -1)
    present = set(range(workers))
    for place, (kind, worker, step, *_) in enumerate(log):
        where = f"entry {place}: worker {worker}, step {step}"
        if kind == Kind.ASIDE:
            present.discard(worker)
        elif kind == Kind.PULL:
            present.add(worker)
            pulled[worker] = step
            ahead = {other: updates[other] for other in present}
            if too_far_ahead(step, ahead, bound):
                found.append(f"{where} begins {step - min(ahead.values())} steps ahead of the slowest; bound {bound}")
            if step != updates[worker]:
                found.append(f"{where} begins after {updates[worker]} of its own updates")
        else:
            if step != updates[worker]:
                found.append(f"{where} is the update number {updates[worker]} of this worker: out of order, or twice")
            if pulled[worker] != step:
                found.append(f"{where} is an update of values that were not pulled")
            updates[worker] += 1
    return found


def staleness(log: UpdateLog) -> Counter[int]:
    """How many updates were as stale as that: by so many updates of other workers that this owner made between the pull
    of a step and its update."""
    found, pulled, count = Counter[int](), dict[int, int](), 0
    for kind, worker, *_ in log:
        if kind == Kind.PULL:
            pulled[worker] = count
        elif kind == Kind.PUSH:
            found[count - pulled[worker]] += 1
            count += 1
    return found
