"""Sees to it that nobody waits in silence: says where this rank stands, and who keeps it waiting.

The thread that trains may be held in a wait of gloo's, which lets other threads run. One of ours writes every second
where this rank stands, and looks at the others only while it waits long: a rank that stops writing has stopped, or is
in a call that lets no thread run. Horovod's stall inspector is the model; it needs a coordinator, which we have not.

Nothing here ends a wait: that is the timeout of the groups.
"""

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from armillary.runtime.board import Board
from armillary.runtime.last_words import LastWords
from armillary.runtime.lost import adds_nothing, remedy
from armillary.runtime.patience import Patience
from armillary.runtime.standing import ABSENT, SILENT, Stand, Standing

__all__ = ["Watchdog"]

BEAT_SECONDS = 1.0  # between two words of where this rank stands
SILENT_SECONDS = 3.0  # without one, after which a rank is said to be silent, and for which a stopped one is waited for
GLANCE_SECONDS = 0.1
UNANSWERED = "the others: unknown, as the process that keeps the job's store (rank 0, or the launcher) does not answer"


class SeenPeer(NamedTuple):
    """A stand of another rank; when it was first seen, and last."""

    stand: Stand
    first: float
    last: float

    @property
    def silent_seconds(self) -> float:
        return 0.0 if self.stand.end else self.last - self.first

    @property
    def known(self) -> Stand:
        """Nothing, where it is silent."""
        return Stand(end=SILENT) if self.silent_seconds > SILENT_SECONDS else self.stand

    def __str__(self) -> str:
        if self.silent_seconds > SILENT_SECONDS:
            return f"{SILENT} for {self.silent_seconds:.0f} s, last seen {self.stand.place}"
        return str(replace(self.stand, seconds=self.stand.seconds + self.last - self.first))


class Watchdog:
    """Of one rank, from the opening of its connections until `end`. It keeps nothing of a run alive. A rank
    that is alone needs none: it does nothing then."""

    def __init__(self, standing: Standing, board: Board, patience: Patience) -> None:
        self._standing, self._board, self.patience = standing, board, patience
        self._seen: dict[int, SeenPeer] = {}
        self._is_answered = True  # by the store
        self._end = ""  # how this rank's program ended
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="armillary-watchdog", daemon=True)
        self._is_alone = board.workers == 1
        if not self._is_alone:
            board.put(standing.now())
            self._last_words = LastWords(self.tell)
            self._thread.start()

    def _watch(self) -> None:
        report_after, timeout = self.patience.report_after, self.patience.timeout
        shortest = report_after or timeout
        beat, began, reports = 0, 0.0, 0  # reports: of the wait that began then
        while not self._over.wait(min(BEAT_SECONDS, shortest / 4)):
            beat += 1
            self._board.put(self._standing.now(beat, self._end))
            what, since = self._standing.wait
            waited = time.monotonic() - since
            if not what or waited < shortest / 2:
                continue
            self._look()
            if since != began:
                began, reports = since, 0
            if report_after is not None and waited >= report_after * (reports + 1):
                reports += 1
                if self._standing.wait == (what, since) and self._reports(report_after):
                    print(self._report(), file=sys.stderr, flush=True)

    def _look(self) -> None:
        """At the others."""
        stands = self._board.stands()
        self._is_answered = stands is not None
        for rank in range(self._board.workers if stands is not None else 0):
            if rank != self._board.rank:
                stand = (stands or {}).get(rank, Stand(end=ABSENT))
                now, before = time.monotonic(), self._seen.get(rank)
                self._seen[rank] = SeenPeer(stand, before.first if before and before.stand == stand else now, now)

    def _reports(self, report_after: float) -> bool:
        """Whether this rank is the one that reports: the first of those that wait so long and write still."""
        earlier = (one for rank, one in self._seen.items() if rank < self._board.rank)
        return not any(
            one.silent_seconds <= SILENT_SECONDS
            and one.stand.waited_seconds > 0.75 * report_after  # it wrote a moment ago
            for one in earlier
        )

    def _report(self) -> str:
        everyone = self._listed({self._board.rank: str(self._standing.now())})
        return f"armillary: {everyone} (a wait ends after timeout={self.patience.timeout:g} s)"

    @contextmanager
    def waiting(self, what: str, is_held_up: bool = True) -> Iterator[None]:
        """Around every wait for other ranks. is_held_up: whether the thread that trains is held up by it.

        Raises:
            RuntimeError: a peer is gone, or did not come in time; says where everyone stood and what came first.
        """
        began = time.monotonic()
        with self._standing.waiting(what) if is_held_up else nullcontext():
            try:
                yield
            except RuntimeError as error:
                said = self._lost(what, time.monotonic() - began, error)
                raise RuntimeError(said) from None if adds_nothing(error) else error

    def _lost(self, what: str, waited_seconds: float, error: RuntimeError) -> str:
        """A wait of this rank for that failed, and why, in one sentence; the other ranks are told of it."""
        mine = replace(self._standing.now(), wait=what)
        is_late = waited_seconds >= 0.9 * self.patience.timeout
        first = self._board.told() if is_late else self._heard()
        self._look()
        why = f"its peers did not come within timeout={self.patience.timeout:g} s" if is_late else "a peer has stopped"
        said = [f"rank {self._board.rank}: {mine.where}: {why}"]
        if is_late or not first:
            said += [self._listed({}), remedy(mine, [one.known for one in self._seen.values()])]
        told = ". ".join(filter(None, said))
        first = first or self._board.tell(told)
        if first != told:
            said.append(f"The first error was on {first}")
        if not adds_nothing(error):
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
        while not (first := self._board.told()) and time.monotonic() < until:
            self._look()
            time.sleep(GLANCE_SECONDS)
        return first

    def tell(self, error: str) -> None:
        """An error ends this rank's part."""
        if not self._is_alone:
            self._end = f"has stopped with {error.partition(':')[0]}, {self._standing.now().place}"
            self._board.tell(f"rank {self._board.rank}: {error}")

    def end(self, how: str) -> None:
        """Stops. how: what ranks that wait for this one read, unless it has ended with an error; empty if none do."""
        if self._is_alone:
            return
        self._over.set()
        self._last_words.remove()
        if threading.current_thread() is not self._thread:
            self._thread.join(SILENT_SECONDS)
        if how:
            self._board.leave(self._standing.now(end=self._end or how))
        else:
            self._board.withdraw()
