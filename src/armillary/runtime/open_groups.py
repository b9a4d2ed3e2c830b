"""The process groups of one transport: opened for it, given back with it, and given up where nobody can be waited for.

Among some of the ranks of a job, a group that was given back is kept, and taken by the next transport of these ranks.
torch names it by its ranks, so another one would have the same name: a rank that is early would read, from the job's
store, where a late one listened before, and wait for it there.

Gloo frees a group only when its collectives are over, however long a peer takes. A group that is given up in the middle
of one is therefore never freed: it costs its few threads until the process ends.
"""

import atexit
import ctypes
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

__all__ = ["Clients", "OpenGroups"]

FEW_WORKS = 64  # collectives that nobody waited for, remembered before those that are over are forgotten


class Clients(NamedTuple):
    """Connections to the job's store. One that waits for an answer keeps no other from asking.

    asking: may wait for an answer for ever. writing: never does.
    """

    writing: Any
    asking: Any


class Asked(NamedTuple):
    """What two groups must have in common, for one to stand for the other. ranks: of the job."""

    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta


_CLIENTS: "weakref.WeakKeyDictionary[Any, Clients]" = weakref.WeakKeyDictionary()  # by the store, while it is there
_KEPT: "weakref.WeakKeyDictionary[Any, dict[Asked, list[Any]]]" = weakref.WeakKeyDictionary()  # by those that take part


class OpenGroups:
    """What is still open when the process ends is given up then, without waiting.

    Args:
        process_group: the ranks that take part, in its order; None: all of the job.
    """

    def __init__(self, process_group: Any, timeout_seconds: float) -> None:
        self.parent: Any = process_group or dist.group.WORLD
        self.timeout = timedelta(seconds=timeout_seconds)
        self.rank, self.workers = dist.get_rank(self.parent), dist.get_world_size(self.parent)
        self._open: list[tuple[Asked, Any]] = []
        self._works: set[Any] = set()  # collectives that may be under way; each keeps its tensors
        self._at_exit = _giving_up(weakref.ref(self))
        atexit.register(self._at_exit)

    def new(self, ranks: Sequence[int], backend: str = "gloo") -> Any:
        """A group of these of the ranks; all of them must call it. Ranks of the job that do not take part are not
        asked."""
        everyone = dist.get_process_group_ranks(self.parent)
        asked = Asked(tuple(everyone[rank] for rank in ranks), backend, self.timeout)
        kept = _KEPT.get(self.parent, {}).get(asked)
        group = kept.pop() if kept else self._made(asked)
        if self.rank in ranks:
            self._open.append((asked, group))
        return group

    def _made(self, asked: Asked) -> Any:
        return dist.new_group(list(asked.ranks), asked.timeout, asked.backend, use_local_synchronization=self.is_part)

    @property
    def is_part(self) -> bool:
        """Whether ranks of the job do not take part."""
        return self.parent is not dist.group.WORLD

    def noted(self, work: Any) -> Callable[[], Any]:
        """The wait for a collective of one of these groups."""
        if len(self._works) >= FEW_WORKS:
            self._works = {one for one in self._works if not one.is_completed()}
        self._works.add(work)

        def wait() -> Any:
            answer = work.wait()
            self._works.discard(work)
            return answer

        return wait

    def close(self) -> None:
        """Nothing may be under way."""
        self._end(is_kept=self.is_part)

    def give_up(self) -> None:
        """Likewise whatever is under way. Ranks that wait for this one then hear at once that it has gone; where a
        collective is under way, when this process ends."""
        if any(not work.is_completed() for work in tuple(self._works)):
            for _, group in self._open:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._end(is_kept=False)

    def _end(self, is_kept: bool) -> None:
        atexit.unregister(self._at_exit)
        while self._open:
            asked, group = self._open.pop()
            if dist.is_initialized() and is_kept:
                _KEPT.setdefault(self.parent, {}).setdefault(asked, []).append(group)
            elif dist.is_initialized():
                dist.destroy_process_group(group)
        self._works.clear()

    @property
    def clients(self) -> Clients:
        """Of the job's store, beside its own; the same for all groups of a process.

        To connect may take seconds where host names cannot be looked up, so it is done once a job.
        """
        store: Any = dist.distributed_c10d._get_default_store()
        if store not in _CLIENTS:
            _CLIENTS[store] = Clients(store.clone(), store.clone())
        return _CLIENTS[store]


def _giving_up(known: "weakref.ref[OpenGroups]") -> Callable[[], None]:
    """For the end of the process; keeps nothing alive."""

    def give_up() -> None:
        groups = known()
        if groups is not None:
            groups.give_up()

    return give_up
