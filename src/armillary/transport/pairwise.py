"""All-to-all and short all-reduces on gloo, in which pairs of ranks take turns.

In turn s a rank sends to the s-th rank after it and receives from the s-th before it: every link carries one message
each way, and none is shared. Gloo's own all-to-all sends to all at once, so in front of every receiver all senders wait
for one another. Half as many turns as there are ranks are under way at a time: with fewer, a rank that comes late
leaves the others' links idle. Each request has its own tags and all receives are posted at once, so ranks need not be
at the same turn.

There are no turns for small pieces, between two ranks, and beside another long all-to-all, whose gaps it fills. Under
prefetch there are turns all the same (`keeps_order`): rows for a later step would else take the link from those that a
forward waits for. A piece is small where it crosses in less than `TURN_SECONDS` (`Topology.turn_bytes`).

An all-reduce is two of these: every rank adds up its piece, in rank order, and gives the sum to all. Gloo's ring has 2
(n - 1) hops, each of which waits behind whatever else is on its way. It keeps the long ones, where that hardly shows.

Figures: `benchmarks/turns`. Source: pairwise exchange (Thakur, Rabenseifner and Gropp, 2005), as MPICH does it for long
messages.
"""

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.plans.parcel import RankInfo
from armillary.plans.topology import TURN_BYTES

__all__ = ["LONG_BYTES", "Pairwise"]

LONG_BYTES = 1 << 20  # of an all-reduce that gloo's ring does better
FEWEST_TURNS = 2  # under way at a time
TAGS = 1 << 16  # a tag is free again long before so many requests are under way

Wait = Callable[[], None]


class Pairwise:
    """State of one rank. One thread sees to the turns, of one request after another in the order they were asked for;
    it lives from the first that needs it until `close`.

    Args:
        turn_bytes: of the longest piece that does not wait for its turn.

    keeps_order: what was asked for first arrives first; ranks need not agree on it.
    """

    def __init__(self, turn_bytes: int = TURN_BYTES) -> None:
        self.turn_bytes = turn_bytes
        self.keeps_order = False
        self.under_way: set[_Turns] = set()  # long all-to-alls that were asked for and are not waited for
        self.tags: Counter[Any] = Counter()  # by group: ranks of another one need not have made as many requests
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.progress_thread: threading.Thread | None = None

    def all_to_all(
        self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: Any, ranks: RankInfo
    ) -> tuple[Wait, Tensor]:
        """
        Args:
            tensor: (sum(send), ...), on the host, contiguous; not to be changed before the wait is over.
            group: a gloo group in which this rank stands at `ranks`.

        Returns:
            The wait, and the answer, (sum(receive), ...), to be read after it.
        """
        answer = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        row_bytes = tensor.element_size() * tensor.shape[1:].numel()
        outgoing = _Side(tensor.split_with_sizes(send), [count * row_bytes for count in send])
        incoming = _Side(answer.split_with_sizes(receive), [count * row_bytes for count in receive])
        turns = self._turns(group, ranks, outgoing, incoming)
        if ranks.workers <= 2 or max(*outgoing.bytes, *incoming.bytes) <= self.turn_bytes:
            return turns.begin(), answer
        self.under_way.add(turns)
        carried = self.see_to(partial(turns.carry, self._is_lone)) if self._is_lone() else turns.begin()

        def wait() -> None:
            try:
                carried()
            finally:
                self.under_way.discard(turns)

        return wait, answer

    def _is_lone(self) -> bool:
        return self.keeps_order or len(self.under_way) <= 1

    def all_reduce(self, tensor: Tensor, group: Any, ranks: RankInfo) -> tuple[Wait, Tensor]:
        """The sum over ranks, in place. tensor: on the host, contiguous."""
        flat = tensor.view(-1)
        cuts = [flat.numel() * rank // ranks.workers for rank in range(ranks.workers + 1)]
        pieces = flat.split([end - first for first, end in pairwise(cuts)])
        mine = pieces[ranks.rank]
        addends = mine.new_empty(ranks.workers, mine.numel())
        scatter = self._turns(group, ranks, _side(pieces), _side(addends.unbind()))
        gather = self._turns(group, ranks, _side([mine] * ranks.workers), _side(pieces))

        def carry() -> None:
            scatter.carry()
            mine.copy_(addends[0])
            for addend in addends[1:]:
                mine.add_(addend)
            gather.carry()

        return self.see_to(carry), tensor

    def _turns(self, group: Any, ranks: RankInfo, outgoing: "_Side", incoming: "_Side") -> "_Turns":
        return _Turns(_Lane(group, self._next_tag(group), self.turn_bytes), ranks, outgoing, incoming)

    def _next_tag(self, group: Any) -> int:
        self.tags[group] = (self.tags[group] + 1) % TAGS
        return self.tags[group]

    def see_to(self, carry: Callable[[], Any]) -> Wait:
        """Has it done, after what was asked for before. Returns the wait for that."""
        over, errors = threading.Event(), list[BaseException]()

        def job() -> None:
            try:
                carry()
            except BaseException as error:  # raised where it is waited for
                errors.append(error)
            over.set()

        if self.progress_thread is None:
            self.progress_thread = threading.Thread(target=self._see_to_turns, name="armillary-pairwise", daemon=True)
            self.progress_thread.start()
        self.jobs.put(job)

        def wait() -> None:
            over.wait()
            if errors:
                raise errors[0]

        return wait

    @property
    def is_progress_thread(self) -> bool:
        """Whether the one who asks is the thread that sees to turns: nobody is held up by what it waits for."""
        return threading.current_thread() is self.progress_thread

    def _see_to_turns(self) -> None:
        with torch.no_grad():
            while (job := self.jobs.get()) is not None:
                job()
                del job  # it holds what it carried until the next one comes

    def close(self) -> None:
        """What was asked for is still carried, unless a peer is gone."""
        self.tags.clear()
        self.under_way.clear()
        if self.progress_thread is not None:
            self.jobs.put(None)
            self.progress_thread.join(timeout=1.0)
            self.progress_thread = None

    def give_up(self) -> None:
        """As `close`, but what was asked for and not begun is dropped, and nobody waits."""
        self.tags.clear()
        self.under_way.clear()
        if self.progress_thread is not None:
            with contextlib.suppress(Empty):
                while True:
                    self.jobs.get_nowait()
            self.jobs.put(None)
            self.progress_thread = None


class _Lane(NamedTuple):
    """What the messages of one all-to-all have in common."""

    group: Any
    tag: int
    turn_bytes: int


class _Side(NamedTuple):
    """A contiguous piece for each rank, or from each, and its bytes: known without asking a tensor at every message."""

    pieces: Sequence[Tensor]
    bytes: Sequence[int]


def _side(pieces: Sequence[Tensor]) -> _Side:
    return _Side(pieces, [piece.nbytes for piece in pieces])


class _Turns:
    """One all-to-all on one rank. Receives are posted when it is made, and this rank's own piece is there then."""

    def __init__(self, lane: _Lane, ranks: RankInfo, outgoing: _Side, incoming: _Side) -> None:
        self.lane, self.outgoing, self.incoming = lane, outgoing, incoming
        self.most_under_way = max(FEWEST_TURNS, ranks.workers // 2)
        shifts = range(1, ranks.workers)
        self.pairs = [((ranks.rank + shift) % ranks.workers, (ranks.rank - shift) % ranks.workers) for shift in shifts]
        mine, here = outgoing.pieces[ranks.rank], incoming.pieces[ranks.rank]
        if mine.data_ptr() != here.data_ptr():
            here.copy_(mine)
        self.receives = {
            before: lane.group.recv([incoming.pieces[before]], before, lane.tag)
            for _, before in self.pairs
            if incoming.bytes[before]
        }

    def begin(self) -> Wait:
        """Everything leaves at once."""
        sends = self._send([after for after, _ in self.pairs])

        def wait() -> None:
            _wait_for(list(self.receives.values()))
            _wait_for(sends)

        return wait

    def carry(self, is_lone: Callable[[], bool] = lambda: True) -> None:
        """To the end, in turns; what is small leaves at its turn and is not waited for before the last.

        Args:
            is_lone: whether there is no other long all-to-all; else nothing waits for its turn.
        """
        small, under_way = list[Any](), deque[list[Any]]()
        for after, before in self.pairs:
            works = self._send([after]) + [self.receives[peer] for peer in (before,) if peer in self.receives]
            if max(self.outgoing.bytes[after], self.incoming.bytes[before]) <= self.lane.turn_bytes:
                small += works
            else:
                under_way.append(works)
                if len(under_way) >= self.most_under_way and is_lone():
                    _wait_for(under_way.popleft())
        for works in (*under_way, small):
            _wait_for(works)

    def _send(self, peers: Sequence[int]) -> list[Any]:
        pieces = [(peer, self.outgoing.pieces[peer]) for peer in peers if self.outgoing.bytes[peer]]
        return [self.lane.group.send([piece], peer, self.lane.tag) for peer, piece in pieces]


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
