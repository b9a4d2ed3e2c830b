"""Sees to it that nobody waits in silence: where every rank stands, by the job's store, and who keeps this one waiting.

A rank says which call it is in, what it waits for there and its step, or since when it has been outside; and the first
error. That is in the job's store, so it reaches ranks that wait for a collective. Whoever asks is answered in time or
not at all: the store may be in a process that has stopped.

The thread that trains may be held in a wait of gloo's, which lets other threads run. One of ours writes every second
where this rank stands, and looks at the others only while it waits long. A rank that stops writing has stopped, or is
in a call that lets no thread run. Horovod's stall inspector is the model; it needs a coordinator, which there is none
of here. Nothing here ends a wait: that is the timeout of the groups. Where a wait failed, `timeout_advice` says what to
do, by the calls that the ranks are in.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, TypeVar

from armillary.transport.groups import Clients, CrashReport, Timeouts

__all__ = [
    "ABSENT",
    "CLOSED",
    "LET_GO",
    "SILENT",
    "CallTracker",
    "RankStatus",
    "StatusStore",
    "Watchdog",
    "repeats_others",
    "timeout_advice",
]

# Ends without an error, and no beginning.
SILENT = "no sign of life"
ABSENT = "has not come"
CLOSED = "has closed its run"
LET_GO = "ended its program, or let go of its run, without run.close()"


@dataclass(frozen=True)
class RankStatus:
    """Where a rank stood at one moment.

    Args:
        call: what the user called, empty outside. of: what of, for example a table.
        wait: the request or message it waits for, empty if it computes; waited_seconds: for how long.
        last: the call before.
        seconds: since it entered the call, or left the last one.
        beat: grows with every moment that is told.
        end: how its program ended, if it did.
    """

    call: str = ""
    of: str = ""
    wait: str = ""
    waited_seconds: float = 0.0
    last: str = ""
    seconds: float = 0.0
    step: int = 0
    beat: int = 0
    end: str = ""

    def __str__(self) -> str:
        ago = f", {self.seconds:.0f} s ago" if not self.call else f", since {self.seconds:.0f} s"
        return self.end or self.place + ago

    @property
    def place(self) -> str:
        """Without the time."""
        return self.end or (f"in {self.where}" if self.call else f"outside armillary since its {self.last or 'start'}")

    @property
    def where(self) -> str:
        """The call, what it waits for and its step."""
        call = f"{self.call} of {self.of}" if self.of else self.call
        return ", ".join(filter(None, [call, self.wait, f"step {self.step}"]))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "RankStatus":
        return RankStatus(**json.loads(text))


class CallTracker:
    """Where this rank stands now. Written by the thread that trains.

    step: optimizer steps taken.
    """

    def __init__(self) -> None:
        self.step = 0
        self._call = self._of = self._last = self._wait = ""
        self._since, self._waits_since = time.monotonic(), 0.0

    @contextmanager
    def within(self, call: str, of: str = "") -> Iterator[None]:
        """Inside, the rank is in that call, unless it is in one already: what the user called counts."""
        if self._call:
            yield
            return
        self._since = time.monotonic()
        self._of, self._call = of, call
        try:
            yield
        finally:
            self._last, self._call, self._of, self._since = call, "", "", time.monotonic()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside, the rank waits for that."""
        self._waits_since = time.monotonic()
        self._wait = what
        try:
            yield
        finally:
            self._wait = ""

    @property
    def wait(self) -> tuple[str, float]:
        """What it waits for, empty if nothing, and since when (time.monotonic())."""
        return self._wait, self._waits_since

    def now(self, beat: int = 0, end: str = "") -> RankStatus:
        """Read while it moves, so two of its words may be of neighbouring moments."""
        wait, waits_since = self.wait
        now = time.monotonic()
        waited = now - waits_since if wait else 0.0
        return RankStatus(self._call, self._of, wait, waited, self._last, now - self._since, self.step, beat, end)


ANSWER_SECONDS = 2.0
T = TypeVar("T")


class StatusStore:
    """
    Args:
        clients: of the job's store.
        name: of the transport, the same on its ranks.
    """

    def __init__(self, clients: Clients, name: str, rank: int, workers: int) -> None:
        self.rank, self.workers = rank, workers
        self._writing, self._store, self._name = clients.writing, clients.asking, name
        self._asking: threading.Thread | None = None
        self._is_lost = False  # the store is gone

    def put(self, stand: RankStatus) -> None:
        """Says where this rank stands. Waits for nobody."""
        self._unless_lost(lambda: self._writing.set(self._key(self.rank), stand.to_json()))

    def stands(self) -> dict[int, RankStatus] | None:
        """By rank, of those on the board; None if the store does not answer."""

        def read() -> dict[int, RankStatus]:
            texts = {rank: self._get(self._key(rank)) for rank in range(self.workers)}
            return {rank: RankStatus.from_json(text) for rank, text in texts.items() if text}

        return self._soon(read)

    def tell(self, error: str) -> str:
        """Leaves word of an error. Returns the first word of any rank, which stays: this or another."""
        return self._soon(lambda: str(self._store.compare_set(self._key("error"), "", error).decode())) or error

    def told(self) -> str:
        """The first word of any rank, empty if there is none."""
        return self._soon(lambda: self._get(self._key("error"))) or ""

    def leave(self, stand: RankStatus) -> None:
        """This rank reads no more; its last stand can still be read. The last to leave wipes the board."""
        self.put(stand)
        self._soon(self._left)

    def withdraw(self) -> None:
        """This rank was never here, and said nothing: for a board whose name is used again."""
        self._soon(lambda: [self._store.delete_key(self._key(what)) for what in (self.rank, "error")])

    def _left(self) -> None:
        if self._store.add(self._key("left"), 1) == self.workers:
            for what in (*range(self.workers), "error", "left"):
                self._store.delete_key(self._key(what))

    def _key(self, what: object) -> str:
        return f"armillary/{self._name}/{what}"

    def _get(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _soon(self, ask: Callable[[], T]) -> T | None:
        """The answer, None if it does not come in time."""
        answers: list[T] = []
        before = self._asking
        if before is not None and before.is_alive():
            before.join(ANSWER_SECONDS)
            if before.is_alive():  # it will be no better now
                return None
        asking = threading.Thread(
            target=lambda: self._unless_lost(lambda: answers.append(ask())), name="armillary-board", daemon=True
        )
        with suppress(RuntimeError):  # no thread begins while the interpreter ends
            asking.start()
            self._asking = asking
            asking.join(ANSWER_SECONDS)
        return answers[0] if answers else None

    def _unless_lost(self, act: Callable[[], Any]) -> None:
        if self._is_lost:
            return
        try:
            act()
        except (RuntimeError, ValueError):  # its process has ended
            self._is_lost = True


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
    elif "close" in calls and len(steps := {mine.step, *(peer.step for peer in here)}) > 1:
        said.append(f"ranks have taken different numbers of steps ({min(steps)} to {max(steps)}): take as many on each")
    said += [_ABSENT] * any(peer.end == ABSENT for peer in peers)
    said += [_SILENT] * any(peer.end == SILENT for peer in peers)
    if any(not peer.call for peer in here):
        said.append(_SERVE if mine.call == "look-up" else _AWAY)
    if any(peer.end in (CLOSED, LET_GO) for peer in peers):
        said.append(_CLOSED if mine.call == "evaluate" else _UNEVEN)
    text = "; ".join(dict.fromkeys(said))
    return text[:1].upper() + text[1:]


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
