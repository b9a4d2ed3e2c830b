"""The requests an exchange may make of the other workers. Each is a value; none of them communicates.

An exchange is written once, as a program that yields these (`exchanges/exchange.py`). Three readers give them
meaning: `transport/` carries them over torch.distributed, `reference/lockstep` answers them for N ranks in one
process, and `planning/pricing` turns them into seconds.

Every request names its *scope*, the set of ranks it concerns: all of them (`world`), the ranks of one node (`node`),
or the ranks that have the same place in every node (`rail`). These two exist when nodes hold several ranks. Or it names
an axis of the mesh (`data`): ranks that differ in that coordinate only. These exist when somebody has opened them.

Messages between two ranks are requests too (`Send`, `Receive`). Between two ranks they keep one order: the n-th that
one sends is the n-th that the other receives. Nothing else joins a message to its receive; `what` is checked, never
matched.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from torch import Tensor

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Labelled",
    "Message",
    "Program",
    "Receive",
    "Request",
    "Scope",
    "Send",
    "alone",
    "along",
    "asked_by",
    "gathered",
    "members",
    "sent_bytes",
    "summed",
]

Scope = Literal["world", "node", "rail", "data"]


def members(scope: Scope, workers: int, workers_per_node: int) -> list[list[int]]:
    """The ranks of every group of that scope, ascending."""
    nodes = [list(range(first, first + workers_per_node)) for first in range(0, workers, workers_per_node)]
    if scope == "node":
        return nodes
    return [list(range(workers))] if scope == "world" else [list(rail) for rail in zip(*nodes, strict=True)]


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Sum over ranks, answered with a tensor of the same shape.

    The asker gives the tensor away: a reader may sum into it and answer with the same storage.
    """

    tensor: Tensor
    scope: Scope = "world"


@dataclass(frozen=True, eq=False)
class AllGather:
    """Every rank's tensor, of one shape on all ranks; answered with shape (ranks, *tensor.shape)."""

    tensor: Tensor
    scope: Scope = "world"


@dataclass(frozen=True, eq=False)
class AllToAll:
    """A piece for every rank: `send[r]` leading rows of `tensor` to rank r, in rank order.

    Answered with shape (sum(receive), *tensor.shape[1:]): `receive[r]` rows from rank r, in rank order. A reader
    refuses splits that do not add up; peers must agree (what r sends to q is what q receives from r).
    """

    tensor: Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    scope: Scope = "world"

    def __post_init__(self) -> None:
        if len(self.send) != len(self.receive):
            raise ValueError(
                f"AllToAll: {len(self.send)} send sizes, {len(self.receive)} receive sizes; want one per rank"
            )
        if sum(self.send) != self.tensor.shape[0]:
            raise ValueError(
                f"AllToAll: sizes to send add up to {sum(self.send)}, the tensor has {self.tensor.shape[0]} rows"
            )


@dataclass(frozen=True, eq=False)
class Send:
    """A tensor for one other rank; over when that rank has it. Until then nobody may change the tensor.

    what: as traces and errors call it. at: which of them, for `check_order`.
    route: messages of one route keep their order. Routes of their own are for schedules that are not lowered to a list
        of instructions, whose receivers do not know the order of the sends; "" is the route of those that are.
    """

    what: str
    peer: int
    tensor: Tensor
    route: str = ""
    at: str = ""
    way: ClassVar[str] = "to"


@dataclass(frozen=True, eq=False)
class Receive:
    """Room for the next message of that rank: a contiguous tensor of its form. Over when the room is filled."""

    what: str
    peer: int
    into: Tensor
    route: str = ""
    at: str = ""
    way: ClassVar[str] = "from"


Request = AllReduce | AllGather | AllToAll
Message = Send | Receive
Result = TypeVar("Result")
Program = Generator[Request, Any, Result]


class Labelled(NamedTuple):
    """A request, and the name under which it is traced."""

    request: Request
    label: str


def summed(tensor: Tensor) -> Program[Tensor]:
    """Its sum over all ranks, which takes its place."""
    total: Tensor = yield AllReduce(tensor)
    return total


def gathered(tensor: Tensor) -> Program[Tensor]:
    """Every rank's, (ranks, *tensor.shape)."""
    everyones: Tensor = yield AllGather(tensor)
    return everyones


def asked_by(program: Program[Result], ask: Callable[[Request], Program[Any]]) -> Program[Result]:
    """The same program, each of whose requests is made by `ask`, as it is or another, and answered with its result."""
    answer: Any = None
    while True:
        try:
            request = program.send(answer)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        answer = yield from ask(request)


def along(program: Program[Result], axis: Scope) -> Program[Result]:
    """The same program among the ranks of an axis, each of which is a node by itself."""

    def ask(request: Request) -> Program[Tensor]:
        if request.scope == "node":
            return alone(request)
        answer: Tensor = yield replace(request, scope=axis)
        return answer

    return asked_by(program, ask)


def alone(request: Request) -> Tensor:
    """The answer where no other rank is asked."""
    return request.tensor.unsqueeze(0) if isinstance(request, AllGather) else request.tensor


def sent_bytes(request: Request | Message, ranks: int, rank: int) -> float:
    """Payload bytes that `rank` sends to others for one request among `ranks` ranks.

    All-reduce is counted as the ring it is priced as: 2 (ranks - 1) / ranks of the tensor (Thakur, Rabenseifner and
    Gropp, 2005); all-gather as ranks - 1 copies; all-to-all as what leaves, its own piece excluded. Transport headers
    are not payload.
    """
    match request:
        case Send(tensor=tensor):
            return float(tensor.nbytes)
        case Receive():
            return 0.0
        case AllReduce(tensor):
            return 2 * (ranks - 1) / ranks * tensor.nbytes
        case AllGather(tensor):
            return float((ranks - 1) * tensor.nbytes)
        case AllToAll(tensor, send):
            row_bytes = tensor.element_size() * (tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0)
            return float((sum(send) - send[rank]) * row_bytes)
