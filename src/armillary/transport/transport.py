"""Requests carried by torch.distributed: the one room that calls collectives or holds groups.

Groups of our own, so that the user's collectives never interleave with ours: one for the world, and where nodes hold
several ranks one for the node and one for the rail. CPU tensors travel by gloo; CUDA tensors by the job's own backend.

Measured on gloo: non-contiguous tensors give silently wrong results, so this file alone makes them contiguous; uneven
all_gather fails, so uneven traffic is all_to_all_single; its all_reduce does not add in rank order.
"""

import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.plans.parcel import RankInfo
from armillary.plans.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Labelled,
    Message,
    Program,
    Request,
    Scope,
    Send,
    alone,
    members,
    sent_bytes,
)
from armillary.plans.topology import TURN_BYTES
from armillary.plans.trace import Record
from armillary.transport.groups import DEFAULT_TIMEOUTS, OpenGroups, Timeouts, start_process_group
from armillary.transport.pairwise import LONG_BYTES, Pairwise
from armillary.transport.requests import (
    Messages,
    OutOfOrder,
    Pending,
    Stretches,
    asked,
    can_coalesce,
    coalesced,
    disagreement,
    group_of,
    in_numbers,
    is_doubtful,
    named,
    parted,
    place_in,
    shared_wait,
)
from armillary.transport.watchdog import CLOSED, LET_GO, CallTracker, StatusStore, Watchdog

__all__ = ["Transport", "Wait"]

Wait = Callable[[], Any]
_IN_WORDS: dict[type[Request], str] = {AllReduce: "all-reduce", AllGather: "all-gather", AllToAll: "all-to-all"}
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13


class Transport:
    """This rank's connection to the others. It lives as long as the run; `close` gives its groups back, `give_up` does
    so without waiting for anybody.

    records: one per completed request, or part of one, since `take_records`, when `recording`. stretches: between them.
    turn_bytes: pieces up to this long leave for another rank at once, longer ones take turns on the links
        (`pairwise.py`). `turn_bytes_on` gives it for a topology. Ranks need not agree on it.
    process_group: the ranks that take part, in its order; without, all of the job.
    """

    def __init__(
        self,
        workers_per_node: int = 1,
        check_order: bool = False,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        turn_bytes: int = TURN_BYTES,
        process_group: Any = None,
    ):
        start_process_group()
        self.open_groups = OpenGroups(process_group, timeouts.timeout)
        workers = self.open_groups.workers
        if workers % workers_per_node:
            raise ValueError(f"transport: {workers} ranks do not fill nodes of {workers_per_node}; plan again")
        self.place = RankInfo(self.open_groups.rank, workers, workers_per_node)
        self.check_order, self.recording, self.stretches = check_order, False, Stretches()
        self.call_tracker, self.counts = (
            CallTracker(),
            Counter[Scope](),
        )  # requests; along an axis groups make other numbers
        self.records: list[Record] = []
        self.origin_seconds = time.perf_counter()
        self.groups: dict[tuple[Scope, str], tuple[Any, RankInfo]] = {}
        self.axes: dict[Scope, list[list[int]]] = {}  # ranks of every group along an axis of the mesh
        self.pairwise = Pairwise(turn_bytes)
        self.lanes: dict[bool, Any] = {}  # of messages, by whether they go to a higher rank
        self.messages = Messages(self.place.rank, self._lane, check_order)
        self.watchdog = self._watched(f"opening/{self.open_groups.parent.group_name}", timeouts)
        try:
            with self.within("attach"), self.waiting("connections to the others"):
                name = self._open_all()
                self.order_group = self.open_groups.new(range(workers)) if check_order else None
        except BaseException:
            self.open_groups.give_up()
            raise
        finally:
            self.watchdog.end("")
        self.watchdog = self._watched(name, timeouts)
        self._let_go = weakref.finalize(self, self.watchdog.end, LET_GO)

    def _watched(self, name: str, timeouts: Timeouts) -> Watchdog:
        status_store = StatusStore(self.open_groups.clients, name, self.place.rank, self.place.workers)
        return Watchdog(self.call_tracker, status_store, timeouts)

    def _open_all(self) -> str:
        """Their name."""
        backends = {"cpu": "gloo"} | ({"cuda": "nccl"} if "nccl" in str(dist.get_backend()) else {})
        for device, backend in backends.items():
            self._open("world", device, backend)
        name = self._agreed_name()
        for device, backend in backends.items():
            if self.place.workers_per_node > 1:
                self._open("node", device, backend)
                self._open("rail", device, backend)
        return name

    def _open(self, scope: Scope, device: str, backend: str) -> None:
        for ranks in self._members(scope):  # every rank must take part in making every group
            group = self.open_groups.new(ranks, backend)
            if self.place.rank in ranks:
                self.groups[scope, device] = (group, RankInfo(ranks.index(self.place.rank), len(ranks)))

    def open_axis(self, axis: Scope, groups: list[list[int]]) -> None:
        """Collective: opens the groups along an axis of the mesh, as `Mesh.members` has them, unless they are open.

        Requests of that scope are made by the ranks of one group; those of another make theirs at times of their own.
        """
        if self.axes.get(axis) != groups:
            self.axes[axis] = groups
            for device in [device for scope, device in self.groups if scope == "world"]:
                self._open(axis, device, "gloo" if device == "cpu" else "nccl")

    def _members(self, scope: Scope) -> Sequence[Sequence[int]]:
        return self.axes.get(scope) or members(scope, self.place.workers, self.place.workers_per_node)

    def _agreed_name(self) -> str:
        """Of this transport, rank 0's choice. Ranks that go on to open different groups would wait for each other."""
        everyones: list[Any] = [None] * self.place.workers
        mine = ((self.place.workers_per_node, self.check_order), uuid.uuid4().hex)
        dist.all_gather_object(everyones, mine, group=self.groups["world", "cpu"][0])
        wanted = [groups for groups, _ in everyones]
        if len(set(wanted)) > 1:
            raise ValueError(
                f"transport: ranks want different groups, (workers per node, check_order) in rank order: {wanted}; "
                "give every rank the same plan and arguments"
            )
        return str(everyones[0][1])

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.call_tracker.step

    @step.setter
    def step(self, step: int) -> None:
        self.call_tracker.step = step

    def within(self, call: str, of: str = "") -> AbstractContextManager[None]:
        """Inside, other ranks see this one in that call (of that), unless it is in another already."""
        return self.call_tracker.within(call, of)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around every wait for other ranks; see `Watchdog.waiting`."""
        return self.watchdog.waiting(what, is_held_up=not self.pairwise.is_progress_thread)

    def start(self, request: Request, label: str, parts: Sequence[Labelled] = ()) -> Wait:
        """Sends a request on its way; the function returned waits for it and gives the answer.

        Args:
            parts: what it is made of, each with its label, where that is to be recorded apart.

        Raises:
            RuntimeError: a peer is gone, or (check_order) asked for something else; the message names rank and group.
        """
        self.counts[request.scope] += 1
        scope, ranks = request.scope, self.place_in(request)
        if self.check_order and (ranks.workers > 1 or scope == "node"):
            self._refuse_other_orders(request, label)
        began = time.perf_counter()
        if ranks.workers == 1:
            return lambda: alone(request)
        what = f"{_IN_WORDS[type(request)]} of {label}"
        with self.waiting(what), named(f"{label}.{type(request).__name__}"):
            carried, answer, held = self._launch(request, group_of(self.groups, scope, request.tensor), ranks)

        def wait() -> Any:
            del_after = held  # the sender's buffer is read late: it lives until the wait returns
            with self.waiting(what), named(f"{label}.wait"), self.stretches.waiting(label):
                carried()
            del del_after
            if self.recording:
                self._record(parts or [Labelled(request, label)], ranks, began)
            return answer

        return wait

    def start_together(self, asked: Sequence[Labelled]) -> list[Wait]:
        """Like `start` for each of these; all-to-alls among the same ranks are carried, and recorded, as parts of one.

        All ranks must ask for the same list.
        """
        requests = [request for request, _ in asked]
        if self.place.workers == 1 or not can_coalesce(requests):
            return [self.start(*one) for one in asked]
        to_all = [request for request in requests if isinstance(request, AllToAll)]
        together = " + ".join(dict.fromkeys(label for _, label in asked))
        begun = self.start(coalesced(to_all), together, asked)
        whole = shared_wait(lambda: parted(to_all, begun()), partial(self.waiting, f"all-to-all of {together}"))

        def part(number: int) -> Any:
            return whole()[number]

        return [partial(part, number) for number in range(len(asked))]

    def let_go(self, wait: Wait) -> None:
        """Nobody will ask for this answer: it is still carried, as other ranks may depend on it."""
        self.pairwise.see_to(wait)

    def complete(self, program: Program[Any], label: str, answer: Any = None) -> Any:
        """Carries one program to its end, one request at a time; `answer` is that to a request already made."""
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self.start(request, label)()

    def place_in(self, request: Request) -> RankInfo:
        """This rank's, among those that a request concerns."""
        return place_in(self.groups, request)

    def _launch(self, request: Request, group: Any, ranks: RankInfo) -> tuple[Wait, Tensor, Tensor]:
        tensor = request.tensor.detach().contiguous()
        on_host = tensor.device.type == "cpu"
        if isinstance(request, AllReduce):
            if on_host and ranks.workers > 2 and tensor.nbytes < LONG_BYTES:
                return *self.pairwise.all_reduce(tensor, group, ranks), tensor
            return self.open_groups.noted(dist.all_reduce(tensor, group=group, async_op=True)), tensor, tensor
        if isinstance(request, AllGather):
            answer = tensor.new_empty((ranks.workers, *tensor.shape))
            work = _all_gather_single(answer.view(-1), tensor.view(-1), group=group, async_op=True)
            return self.open_groups.noted(work), answer, tensor
        if on_host:
            return *self.pairwise.all_to_all(tensor, request.send, request.receive, group, ranks), tensor
        answer = tensor.new_empty((sum(request.receive), *tensor.shape[1:]))
        receive, send = list(request.receive), list(request.send)
        work = dist.all_to_all_single(answer, tensor, receive, send, group=group, async_op=True)
        return self.open_groups.noted(work), answer, tensor

    def _record(self, parts: Sequence[Labelled], ranks: RankInfo, began: float) -> None:
        """Parts of one request take time by their bytes, one after another."""
        seconds = time.perf_counter() - began
        sent = [sent_bytes(request, ranks.workers, ranks.rank) for request, _ in parts]
        for (request, label), mine in zip(parts, sent, strict=True):
            took = seconds * (mine / sum(sent) if sum(sent) else 1 / len(parts))
            kind = type(request).__name__
            self.records.append(Record(self.step, label, kind, began - self.origin_seconds, took, mine))
            began += took

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Inside, requests are not counted: they belong to no step."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def take_records(self) -> tuple[Record, ...]:
        """The records so far; forgets them."""
        taken, self.records = tuple(self.records), []
        return taken

    def _refuse_other_orders(self, request: Request, label: str) -> None:
        group, scopes, ranks = self.order_group, self._members(request.scope), list(range(self.place.workers))
        if request.scope in self.axes:  # other groups ask at times of their own
            group = self.groups[request.scope, "cpu"][0]
            ranks = next(list(those) for those in scopes if self.place.rank in those)
            scopes = [range(len(ranks))]
        mine, everyones = asked(self.counts[request.scope], label, request), [asked(0, "", request)] * len(ranks)
        numbers = torch.empty(len(ranks), 1 + 2 * len(ranks), dtype=torch.int64)
        with self.waiting(f"comparison of requests for {label}"):
            _all_gather_single(numbers.view(-1), in_numbers(mine, len(ranks)), group=group)
            if is_apart := is_doubtful(numbers, scopes):
                dist.all_gather_object(everyones, mine, group=group)
        if is_apart:  # not inside the wait, where it would be taken for the end of a peer
            raise RuntimeError(f"ranks out of order: {disagreement(everyones, scopes, ranks)}")

    def share(self, thing: Any) -> list[Any]:
        """Every rank's picklable `thing`, in rank order. For start-up and checkpoints, never inside a step."""
        everyones: list[Any] = [None] * self.place.workers
        with self.waiting("all-gather of objects"):
            dist.all_gather_object(everyones, thing, group=self.groups["world", "cpu"][0])
        return everyones

    def spread(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites `tensor` on every rank with root's."""
        if self.place.workers == 1:
            return
        whole = tensor.detach().contiguous()
        with self.waiting(f"broadcast from rank {root}"):
            dist.broadcast(whole, group_src=root, group=group_of(self.groups, "world", whole))
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)

    def open_lanes(self) -> None:
        """Collective: messages to higher ranks and those to lower ones get connections of their own.

        Gloo tells the sender of a posted receive on the connection of the message itself, behind everything that is
        queued there the other way; with megabytes in both directions a message then waits for what it has nothing to
        do with (ring of 2 workers, 1 Gbit/s: 429 ms a step, with lanes 382).
        """
        self.lanes = {is_up: self.open_groups.new(range(self.place.workers)) for is_up in (False, True)}

    def _lane(self, tensor: Tensor, is_up: bool) -> Any:
        on_host = self.lanes and tensor.device.type == "cpu"
        return self.lanes[is_up] if on_host else group_of(self.groups, "world", tensor)

    def post(self, message: Message) -> Pending:
        """Starts a message, or makes room for one of a peer's. `wait` of what is returned ends when it has arrived.

        Raises (by `wait`):
            RuntimeError: the peer is gone, or (check_order) sends something else; it names rank and message.
        """
        tensor = (message.tensor if isinstance(message, Send) else message.into).detach()
        assert isinstance(message, Send) or tensor.is_contiguous(), f"{tuple(tensor.shape)} is not contiguous"
        posted = _Posted(self, message, f"{message.what} {message.way} rank {message.peer}", time.perf_counter())
        with self.waiting(posted.name), named(f"{message.what}.{type(message).__name__}"):
            posted.work = self.messages.start(message, tensor.contiguous())
        return posted

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.place.workers > 1:
            with self.waiting("barrier"):
                dist.barrier(group=self.groups["world", "cpu"][0])

    def agree_largest(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks of a few numbers."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.place.workers > 1:
            with self.waiting("all-reduce of a maximum"):
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.groups["world", "cpu"][0])
        return list(tensor.tolist())

    def tell(self, error: str) -> None:
        """Leaves word for ranks that will wait for this one; asks nobody. The first word stays."""
        self.watchdog.tell(error)

    def close(self) -> None:
        """Gives the groups back; the default process group stays the user's."""
        self._end(CLOSED, self.pairwise.close, self.open_groups.close)

    def give_up(self) -> None:
        """As `close`, but without a request and without waiting, whatever is under way."""
        self._end(LET_GO, self.pairwise.give_up, self.open_groups.give_up)

    def _end(self, how: str, *ends: Callable[[], None]) -> None:
        if self._let_go.detach():
            self.watchdog.end(how)
        for end in ends:
            end()
        self.lanes.clear()
        self.groups.clear()
        self.order_group = None


@dataclass(eq=False, slots=True)
class _Posted:
    """A message under way."""

    transport: Transport
    message: Message
    name: str
    began: float
    work: Any = None

    def wait(self) -> None:
        transport, message = self.transport, self.message
        try:
            with transport.waiting(self.name), named(f"{message.what}.wait"):
                self.work.wait()
        except OutOfOrder as error:
            raise RuntimeError(str(error)) from None
        if transport.recording:
            kind, seconds = type(message).__name__, time.perf_counter() - self.began
            sent = sent_bytes(message, transport.place.workers, transport.place.rank)
            began = self.began - transport.origin_seconds
            transport.records.append(Record(transport.step, message.what, kind, began, seconds, sent, message.at))
