"""Sees to it that nobody waits in silence: says where this rank stands, and who keeps it waiting.

The thread that trains may be held in a wait of gloo's, which lets other threads run. One of ours writes every second
where this rank stands, and looks at the others only while it waits long. A rank that stops writing has stopped, or is
in a call that lets no thread run. Horovod's stall inspector is the model; it needs a coordinator, which there is none
of here.

Nothing here ends a wait: that is the timeout of the groups. Where a wait failed, `timeout_advice` says what to do, by
the calls that the ranks are in. `CrashReport` tells the others of the error that ends this rank's program.
`shared_wait` lets several threads have one answer, since a second wait for one of gloo's receives never ends.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

from armillary.transport.rank_status import ABSENT, CLOSED, LET_GO, SILENT, CallTracker, RankStatus, StatusStore

__all__ = ["DEFAULT_TIMEOUTS", "CrashReport", "Timeouts", "Watchdog", "repeats_others", "shared_wait", "timeout_advice"]

# What gloo says of a peer that has left or did not come: not who, nor in what.
_BARE = ("closed by peer", "reset by peer", "timed out", "timeout", "broken pipe", "connection refused")

_COLLECTIVE = ("save", "load", "export", "evaluate", "report")
_NORM = "the norm of a spread table's gradient is known only if every rank asks for it"
_CLOSED = (
    "a rank that has left the run serves no other: call run.evaluate on every rank before run.close(), or evaluate the "
    "plain model after it"
)
_UNEVEN = "ranks that may run out of data at different steps want run.batches(loader)"
_SERVE = (
    "rows of a spread table are served by ranks that are in a call of armillary's: let every rank evaluate "
    "(run.evaluate), or train on meanwhile"
)
_ABSENT = "every rank of the job must call attach, or parallelize, and come within the timeout"
_SILENT = (
    "a silent process was killed or stopped, or is in a call that lets no other thread run: see its output and "
    "whether it ran out of memory"
)
_AWAY = (
    "a rank may be away for as long as timeout= of attach or parallelize says: give more; if its data ran out, use "
    "run.batches(loader)"
)


def repeats_others(error: BaseException) -> bool:
    """Whether the transport's own words say no more than that a peer is gone or late."""
    text = str(error).lower()
    return any(bare in text for bare in _BARE)


def timeout_advice(mine: RankStatus, peers: Sequence[RankStatus]) -> str:
    """What to do; empty if where the ranks stand does not say."""
    here = [peer for peer in peers if not peer.end]
    calls = dict.fromkeys([mine.call, *(peer.call for peer in here)])
    said = []
    if len(calls) > 1:
        said = [f"every rank must call run.{call}, not one alone" for call in calls if call in _COLLECTIVE]
        said += [_NORM] * ("gradient norm" in calls) + [_UNEVEN] * ("close" in calls)
    said += [_ABSENT] * any(peer.end == ABSENT for peer in peers)
    said += [_SILENT] * any(peer.end == SILENT for peer in peers)
    if any(not peer.call for peer in here):
        said.append(_SERVE if mine.call == "look-up" else _AWAY)
    if any(peer.end in (CLOSED, LET_GO) for peer in peers):
        said.append(_CLOSED if mine.call == "evaluate" else _UNEVEN)
    text = "; ".join(dict.fromkeys(said))
    return text[:1].upper() + text[1:]


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


def shared_wait(wait: Callable[[], Any], waiting: Callable[[], AbstractContextManager[None]]) -> Callable[[], Any]:
    """waiting: entered by who comes while another waits."""
    lock, found, errors = threading.Lock(), list[Any](), list[BaseException]()

    def enter() -> None:
        if found or errors:
            return
        try:
            found.append(wait())
        except BaseException as error:  # raised for everyone who waits
            errors.append(error)

    def answer() -> Any:
        if not lock.acquire(blocking=False):
            with waiting():
                lock.acquire()
        try:
            enter()
        finally:
            lock.release()
        if errors:
            raise errors[0]
        return found[0]

    return answer


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


BEAT_SECONDS = 1.0  # between two words of where this rank stands
SILENT_SECONDS = 3.0  # without one, after which a rank is said to be silent, and for which a stopped one is waited for
GLANCE_SECONDS = 0.1
UNANSWERED = "the others: unknown, as the process that keeps the job's store (rank 0, or the launcher) does not answer"


class SeenPeer(NamedTuple):
    """A stand of another rank; when it was first seen, and last."""

    stand: RankStatus
    first: float
    last: float

    @property
    def silent_seconds(self) -> float:
        return 0.0 if self.stand.end else self.last - self.first

    @property
    def known(self) -> RankStatus:
        """Nothing, where it is silent."""
        return RankStatus(end=SILENT) if self.silent_seconds > SILENT_SECONDS else self.stand

    def __str__(self) -> str:
        if self.silent_seconds > SILENT_SECONDS:
            return f"{SILENT} for {self.silent_seconds:.0f} s, last seen {self.stand.place}"
        return str(replace(self.stand, seconds=self.stand.seconds + self.last - self.first))


class Watchdog:
    """Of one rank, from the opening of its connections until `end`. It keeps nothing of a run alive. A rank
    that is alone needs none: it does nothing then."""

    def __init__(self, call_tracker: CallTracker, status_store: StatusStore, timeouts: Timeouts) -> None:
        self._call_tracker, self._status_store, self.timeouts = call_tracker, status_store, timeouts
        self._seen: dict[int, SeenPeer] = {}
        self._is_answered = True  # by the store
        self._end = ""  # how this rank's program ended
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="armillary-watchdog", daemon=True)
        self._is_alone = status_store.workers == 1
        if not self._is_alone:
            status_store.put(call_tracker.now())
            self._last_words = CrashReport(self.tell)
            self._thread.start()

    def _watch(self) -> None:
        report_after, timeout = self.timeouts.report_after, self.timeouts.timeout
        shortest = report_after or timeout
        beat, began, reports = 0, 0.0, 0  # reports: of the wait that began then
        while not self._over.wait(min(BEAT_SECONDS, shortest / 4)):
            beat += 1
            self._status_store.put(self._call_tracker.now(beat, self._end))
            what, since = self._call_tracker.wait
            waited = time.monotonic() - since
            if not what or waited < shortest / 2:
                continue
            self._look()
            if since != began:
                began, reports = since, 0
            if report_after is not None and waited >= report_after * (reports + 1):
                reports += 1
                if self._call_tracker.wait == (what, since) and self._reports(report_after):
                    print(self._report(), file=sys.stderr, flush=True)

    def _look(self) -> None:
        """At the others."""
        stands = self._status_store.stands()
        self._is_answered = stands is not None
        for rank in range(self._status_store.workers if stands is not None else 0):
            if rank != self._status_store.rank:
                stand = (stands or {}).get(rank, RankStatus(end=ABSENT))
                now, before = time.monotonic(), self._seen.get(rank)
                self._seen[rank] = SeenPeer(stand, before.first if before and before.stand == stand else now, now)

    def _reports(self, report_after: float) -> bool:
        """Whether this rank is the one that reports: the first of those that wait so long and write still."""
        earlier = (one for rank, one in self._seen.items() if rank < self._status_store.rank)
        return not any(
            one.silent_seconds <= SILENT_SECONDS
            and one.stand.waited_seconds > 0.75 * report_after  # it wrote a moment ago
            for one in earlier
        )

    def _report(self) -> str:
        everyone = self._listed({self._status_store.rank: str(self._call_tracker.now())})
        return f"armillary: {everyone} (a wait ends after timeout={self.timeouts.timeout:g} s)"

    @contextmanager
    def waiting(self, what: str, is_held_up: bool = True) -> Iterator[None]:
        """Around every wait for other ranks. is_held_up: whether the thread that trains is held up by it.

        Raises:
            RuntimeError: a peer is gone, or did not come in time; says where everyone stood and what came first.
        """
        began = time.monotonic()
        with self._call_tracker.waiting(what) if is_held_up else nullcontext():
            try:
                yield
            except RuntimeError as error:
                said = self._lost(what, time.monotonic() - began, error)
                raise RuntimeError(said) from None if repeats_others(error) else error

    def _lost(self, what: str, waited_seconds: float, error: RuntimeError) -> str:
        """A wait of this rank for that failed, and why, in one sentence; the other ranks are told of it."""
        mine = replace(self._call_tracker.now(), wait=what)
        is_late = waited_seconds >= 0.9 * self.timeouts.timeout
        first = self._status_store.told() if is_late else self._heard()
        self._look()
        why = f"its peers did not come within timeout={self.timeouts.timeout:g} s" if is_late else "a peer has stopped"
        said = [f"rank {self._status_store.rank}: {mine.where}: {why}"]
        if is_late or not first:
            said += [self._listed({}), timeout_advice(mine, [one.known for one in self._seen.values()])]
        told = ". ".join(filter(None, said))
        first = first or self._status_store.tell(told)
        if first != told:
            said.append(f"The first error was on {first}")
        if not repeats_others(error):
            said.append(f"({error})")
        return ". ".join(filter(None, said))

    def _listed(self, words: Mapping[int, str]) -> str:
        """Where the others stand, and these of whom it is known; ranks that stand alike together."""
        alike: dict[str, list[int]] = {}
        for rank, text in sorted({**{rank: str(one) for rank, one in self._seen.items()}, **words}.items()):
            alike.setdefault(text, []).append(rank)
        said = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in alike.items()]
        return "; ".join(said + [UNANSWERED] * (not self._is_answered))

    def _heard(self) -> str:
        """The first error of any rank; a peer that stopped may be about to say why, or may have said nothing."""
        until = time.monotonic() + SILENT_SECONDS + 2 * BEAT_SECONDS
        while not (first := self._status_store.told()) and time.monotonic() < until:
            self._look()
            time.sleep(GLANCE_SECONDS)
        return first

    def tell(self, error: str) -> None:
        """An error ends this rank's part."""
        if not self._is_alone:
            self._end = f"has stopped with {error.partition(':')[0]}, {self._call_tracker.now().place}"
            self._status_store.tell(f"rank {self._status_store.rank}: {error}")

    def end(self, how: str) -> None:
        """Stops. how: what ranks that wait for this one read, unless it has ended with an error; empty if none do."""
        if self._is_alone:
            return
        self._over.set()
        self._last_words.remove()
        if threading.current_thread() is not self._thread:
            self._thread.join(SILENT_SECONDS)
        if how:
            self._status_store.leave(self._call_tracker.now(end=self._end or how))
        else:
            self._status_store.withdraw()
