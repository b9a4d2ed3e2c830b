"""The process groups of one transport: opened for it, given back with it, and given up where nobody can be waited for.

Gloo frees a group only when its collectives are over, however long a peer takes. A group that is given up in the middle
of one is never freed: it costs its few threads until the process ends.

Joining and leaving a job as torchrun describes it, the timeouts of waits, and a rank's place among those with data of
their own, are here too. `CrashReport` tells the others of the error that ends this rank's program.
"""

import atexit
import ctypes
import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from armillary.plans.mesh import DATA, Mesh
from armillary.plans.parcel import RankInfo

__all__ = [
    "DEFAULT_TIMEOUTS",
    "Clients",
    "CrashReport",
    "OpenGroups",
    "Timeouts",
    "data_place",
    "data_ranks",
    "refuse_no_member",
    "start_process_group",
    "stop_process_group",
    "workers_in",
]

JOIN_SECONDS = 600.0  # until every rank of the job has started


def start_process_group() -> None:
    """Joins the job torchrun describes in the environment; alone, it becomes a job of one.

    The group keeps torch's own timeout: its collectives are the user's, not ours. A store prefix per restart attempt
    keeps a restarted gloo job from reading the addresses of the one that died (torchrun reuses its store on one node).
    """
    if dist.is_initialized():
        return
    atexit.register(stop_process_group)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if "RANK" not in os.environ:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
        return
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        workers,
        is_master=rank == 0 and not agents,
        timeout=timedelta(seconds=JOIN_SECONDS),
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = dist.PrefixStore(f"armillary/attempt{attempt}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=workers)


def workers_in(process_group: Any) -> int:
    """How many ranks a group has; None is the job, which is joined for that.

    Raises:
        ValueError: this rank is not in it.
    """
    start_process_group()
    refuse_no_member(process_group)
    return dist.get_world_size(process_group)


def refuse_no_member(process_group: Any) -> None:
    """
    Raises:
        ValueError: this rank is not in the group.
    """
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise ValueError(
            f"process_group: rank {dist.get_rank()} of the job is not one of its ranks; call parallelize, attach or "
            "auto_plan on those only, as in `if dist.get_rank() in ranks:`"
        )


def stop_process_group() -> None:
    """Leaves the job. A process that ends without it may abort, its gloo threads still running."""
    if dist.is_initialized():
        dist.destroy_process_group()


def data_ranks(mesh: Mesh, rank: int) -> list[int]:
    """Those ranks, ascending; this one alone where the mesh has no data axis."""
    groups = mesh.members(DATA) if DATA in mesh.sizes else [[rank]]
    return next(ranks for ranks in groups if rank in ranks)


def data_place(mesh: Mesh, place: RankInfo) -> RankInfo:
    """This rank's among them. Nodes are known only where these are all ranks; else each counts as a node."""
    ranks = data_ranks(mesh, place.rank)
    return place if len(ranks) == place.workers else RankInfo(ranks.index(place.rank), len(ranks))


FEW_WORKS = 64  # collectives that nobody waited for, remembered before those that are over are forgotten


class Clients(NamedTuple):
    """Connections to the job's store. One that waits for an answer keeps no other from asking.

    asking: may wait for an answer for ever. writing: never does.
    """

    writing: Any
    asking: Any


_CLIENTS: "weakref.WeakKeyDictionary[Any, Clients]" = weakref.WeakKeyDictionary()  # by the store, while it is there
_MADE: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()  # groups, by their ranks


class OpenGroups:
    """What is still open when the process ends is given up then, without waiting.

    Args:
        process_group: the ranks that take part, in its order; None: all of the job.
    """

    def __init__(self, process_group: Any, timeout_seconds: float) -> None:
        self.parent: Any = process_group or dist.group.WORLD  # until `close`: who holds it keeps gloo from ending it
        refuse_no_member(self.parent)
        self.timeout = timedelta(seconds=timeout_seconds)
        self.rank, self.workers = dist.get_rank(self.parent), dist.get_world_size(self.parent)
        self._open: list[Any] = []
        self._works: set[Any] = set()  # collectives that may be under way; each keeps its tensors
        self._at_exit = _giving_up(weakref.ref(self))
        atexit.register(self._at_exit)

    def new(self, ranks: Sequence[int], backend: str = "gloo", timeout: timedelta | None = None) -> Any:
        """A group of these of the ranks; all of them must call it. Ranks of the job that do not take part are not
        asked.

        Args:
            timeout: of its waits; None: that of all.
        """
        everyone = dist.get_process_group_ranks(self.parent)
        members, are_all = [everyone[rank] for rank in ranks], self.parent is dist.group.WORLD
        with nullcontext() if are_all else _named_anew(members):
            group = dist.new_group(members, timeout or self.timeout, backend, use_local_synchronization=not are_all)
        if self.rank in ranks:
            self._open.append(group)
        return group

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
        atexit.unregister(self._at_exit)
        while self._open:
            group = self._open.pop()
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._works.clear()
        self.parent = None

    def give_up(self) -> None:
        """Likewise whatever is under way. Ranks that wait for this one then hear at once that it has gone; where a
        collective is under way, when this process ends."""
        if any(not work.is_completed() for work in tuple(self._works)):
            for group in self._open:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.close()

    @property
    def clients(self) -> Clients:
        """Of the job's store, beside its own; the same for all groups of a process.

        To connect may take seconds where host names cannot be looked up, so it is done once a job.
        """
        store: Any = dist.distributed_c10d._get_default_store()
        if store not in _CLIENTS:
            _CLIENTS[store] = Clients(store.clone(), store.clone())
        return _CLIENTS[store]


@contextmanager
def _named_anew(ranks: Sequence[int]) -> Iterator[None]:
    """A group of some ranks that is made meanwhile has a name that none before it had.

    torch names it by its ranks and by how many groups are open here. So one that is made after another was closed would
    have that one's name. A rank that is early would find in the store where a late one listened before, and wait there.
    Ranks that have other groups besides would find no common name at all.
    """
    made, members = _MADE.setdefault(dist.distributed_c10d._get_default_store(), Counter()), "_".join(map(str, ranks))
    made[members] += 1
    name = f"armillary_{members}_{made[members]}"
    torchs_own = dist.distributed_c10d._hash_ranks_to_str
    dist.distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        dist.distributed_c10d._hash_ranks_to_str = torchs_own


def _giving_up(known: "weakref.ref[OpenGroups]") -> Callable[[], None]:
    """For the end of the process; keeps nothing alive."""

    def give_up() -> None:
        groups = known()
        if groups is not None:
            groups.give_up()

    return give_up


class CrashReport:
    """In force until `remove`. tell: is given one line."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell: Callable[[str], object] | None = tell
        self._process = os.getpid()  # not of a process that was forked from this one
        self._before = sys.excepthook
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._tell is not None and os.getpid() == self._process:
            self._tell(f"{kind.__name__}: {error}")
        self._before(kind, error, trace)

    def remove(self) -> None:
        """The hook before is in force again; where somebody else's has been put before this one, this does nothing."""
        self._tell = None
        while isinstance(sys.excepthook, CrashReport) and sys.excepthook._tell is None:
            sys.excepthook = sys.excepthook._before


REPORT_AFTER = 60.0


@dataclass(frozen=True)
class Timeouts:
    """
    Args:
        report_after: seconds of one wait after which a rank prints who stands where, and again whenever as long has
            passed; None: it never does. Its default is half of a shorter timeout.
        timeout: seconds after which a wait ends in an error.

    Raises:
        ValueError: one is no positive number, or a wait would end before it is reported.
    """

    report_after: float | None = REPORT_AFTER
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("timeout", "report_after"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 < value < math.inf) and not (name == "report_after" and value is None):
                or_none = ", or None for no reports" if name == "report_after" else ""
                raise ValueError(f"{name}: want a positive number of seconds{or_none}, got {value!r}")
        if self.report_after == REPORT_AFTER and self.timeout <= REPORT_AFTER:
            object.__setattr__(self, "report_after", self.timeout / 2)
        if self.report_after is not None and self.report_after >= self.timeout:
            raise ValueError(
                f"report_after={self.report_after:g}: a wait ends after timeout={self.timeout:g} seconds, before it is "
                "reported; give a smaller report_after, or None for no reports"
            )


DEFAULT_TIMEOUTS = Timeouts()  # of who did not ask for other
