"""What we run on: nodes, the ranks they hold, the links between ranks, the memory of each. Plain data, JSON both ways.

Two classes of link are told apart, inside a node and between nodes, because the hierarchical exchanges exist for the
difference. A rank's link is what that rank can send at once (its share of the network card). A measured topology also
knows what each kind of request makes of those links, and how fast a rank's processor handles rows and tensors. These
rates are measured once per device, with all ranks at work at once. A hand-written topology may leave both out.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "TURN_BYTES",
    "TURN_SECONDS",
    "CodingRate",
    "Link",
    "Processor",
    "RequestLink",
    "RowRate",
    "Topology",
    "UpdateRate",
    "read_kept",
    "turn_bytes_on",
]


@dataclass(frozen=True)
class RowRate:
    """One kind of index work: seconds = call_seconds + rows * (row_seconds + bytes of a row * byte_seconds).

    residual: largest relative error of that line over the times it was fitted to.
    """

    call_seconds: float
    row_seconds: float
    byte_seconds: float
    residual: float = 0.0

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in asdict(self).items() if not value >= 0}
        if wrong:
            raise ValueError(f"topology: rates of index work must not be negative, got {wrong}")

    def seconds(self, rows: float, row_bytes: float) -> float:
        return self.call_seconds + rows * (self.row_seconds + row_bytes * self.byte_seconds)


@dataclass(frozen=True)
class CodingRate:
    """What a push of an exchange that is not exact takes of a rank's processor among so many workers, links apart:
    seconds = call_seconds + million_seconds for every million float32 values.

    exchange: with its options, as it prints.
    """

    exchange: str
    workers: int
    call_seconds: float
    million_seconds: float
    residual: float = 0.0

    def __post_init__(self) -> None:
        if self.workers < 2 or not (self.call_seconds >= 0 and self.million_seconds >= 0):
            raise ValueError(f"topology: want a coding rate of 2 workers or more, no time below zero, got {self}")


@dataclass(frozen=True)
class UpdateRate:
    """An optimizer's step: seconds = tensors * tensor_seconds + bytes of their weights * byte_seconds."""

    tensor_seconds: float
    byte_seconds: float

    def __post_init__(self) -> None:
        if not (self.tensor_seconds >= 0 and self.byte_seconds >= 0):
            raise ValueError(f"topology: rates of an optimizer's step must not be negative, got {self}")


@dataclass(frozen=True)
class Processor:
    """gather: rows out of a table. merge: equal rows found and added up. add: rows added into a table.

    memory_bytes_per_second: at which whole tensors are read and written, both counted. coding: of the exchanges that
    are not exact, where they were timed. updates: of optimizers, by how many tensors of state they keep for each of
    the model's: SGD, momentum, Adam. landing_seconds: of one gradient, however small, that a schedule collects.
    """

    gather: RowRate
    merge: RowRate
    add: RowRate
    memory_bytes_per_second: float
    coding: tuple[CodingRate, ...] = ()
    updates: tuple[UpdateRate, ...] = ()
    landing_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.memory_bytes_per_second > 0:
            raise ValueError(f"topology: want memory_bytes_per_second > 0, got {self.memory_bytes_per_second}")
        if not self.landing_seconds >= 0:
            raise ValueError(f"topology: want landing_seconds >= 0, got {self.landing_seconds}")

    @property
    def kinds(self) -> tuple[RowRate, ...]:
        """Of index work."""
        return self.gather, self.merge, self.add


def read_kept(path: Path, kind: type[Any], noun: str) -> Any:
    """What `kind.save` wrote there, alone or, as `armillary plan --json` prints it, under its noun beside other things.

    Raises:
        ValueError: there is no such file, or it holds something else.
    """
    try:
        whole = json.loads(path.read_text())
        is_beside = isinstance(whole, dict) and isinstance(whole.get(noun), dict)
        return kind.from_json(json.dumps(whole[noun])) if is_beside else kind.load(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{noun}: {path} is no {noun} file: {_why(error)}") from error


def _why(error: Exception) -> str:
    """In words, whatever the type of the error would have said."""
    match error:
        case FileNotFoundError():
            return "there is none of that name"
        case OSError():
            return f"it cannot be read ({error.strerror})"
        case KeyError():
            return f"it lacks {error}"
        case json.JSONDecodeError():
            return f"it is no JSON ({error})"
    return str(error)


FORMAT = 2
TURN_SECONDS = 2.7e-3  # pieces that cross in less do not take turns on a link (`transport/pairwise.py`)
TURN_BYTES = 32 << 10  # the same, where links are not known; those of 100 Mbit/s carry about as much in that time
BETWEEN_STARTS = 2.0  # times the scatter that one start sees: another has other work beside it

Side = Literal["inside", "between"]


@dataclass(frozen=True)
class Link:
    """One direction of one rank's connection: seconds = latency_seconds + bytes / bytes_per_second."""

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (self.latency_seconds >= 0 and self.bytes_per_second > 0):
            raise ValueError(
                f"topology: a link needs latency_seconds >= 0 and bytes_per_second > 0, got {self.latency_seconds} "
                f"and {self.bytes_per_second}"
            )

    def seconds(self, sent_bytes: float, messages: float = 1) -> float:
        """Time of `messages` dependent messages that carry `sent_bytes` in all."""
        return messages * self.latency_seconds + sent_bytes / self.bytes_per_second


@dataclass(frozen=True)
class RequestLink:
    """What one kind of request ("AllReduce", "AllGather", "AllToAll") was measured to make of the links on one side.

    Args of note:
        link: latency of each of the messages it makes one after another (2 (N - 1) an all-reduce, N - 1 an all-gather,
            1 an all-to-all among N ranks), and bytes per second that a rank sends.
        residual: largest relative error of that line over the sizes that were timed.
        beside_seconds: by how much one that carries nearly nothing delays a rank that computes meanwhile: what it takes
            to call it and to wake threads, which a rank that waits for it pays too.
        scatter: of what was timed, as a share of it: two standard errors. 0 where nobody looked.
    """

    request: str
    side: Side
    link: Link
    residual: float = 0.0
    beside_seconds: float = 0.0
    scatter: float = 0.0

    def __post_init__(self) -> None:
        if not self.beside_seconds >= 0:
            raise ValueError(f"topology: beside_seconds of {self.request} must be >= 0, got {self.beside_seconds}")
        if self.side not in ("inside", "between"):
            raise ValueError(f"topology: side {self.side!r} of {self.request} is none of inside, between")


@dataclass(frozen=True)
class Topology:
    """`nodes` nodes of `workers_per_node` ranks each; ranks are numbered node by node.

    Args of note:
        inside: link between two ranks of a node; between: link between ranks of different nodes.
        memory_bytes: what one rank may hold, the model too.
        backend: "gloo" or "nccl"; they are priced as different machines.
        requests: where measured, the links as single kinds of request find them. processor: where measured.
        hidden_share: of the time that a request's bytes take, what compute can hide; the rest takes the processor from
            it. 1 where nobody measured it.
        uneven_hosts: ranks of each host, where hosts hold different numbers of them. Every rank is a node then.
        rates: by rank, seconds of its step over those of the fastest rank; empty where nobody looked, or all are alike.
    """

    nodes: int
    workers_per_node: int
    inside: Link
    between: Link
    memory_bytes: int
    backend: str = "gloo"
    requests: tuple[RequestLink, ...] = ()
    processor: Processor | None = None
    hidden_share: float = 1.0
    uneven_hosts: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.workers_per_node < 1:
            raise ValueError(
                f"topology: want at least one node of one worker, got {self.nodes} x {self.workers_per_node}"
            )
        for side in ("inside", "between"):
            if not isinstance(link := getattr(self, side), Link):
                raise ValueError(
                    f"topology: {side} is {link!r}; want armillary.Link(seconds a message, bytes a second), as in "
                    "armillary.Link(1e-4, 1e9)"
                )
        if not 0 <= self.hidden_share <= 1:
            raise ValueError(f"topology: hidden_share is a share between 0 and 1, got {self.hidden_share}")
        if self.rates and (len(self.rates) != self.workers or min(self.rates) < 1):
            raise ValueError(
                f"topology: rates want a number >= 1 for each of {self.workers} ranks, times the fastest one's "
                f"seconds, got {self.rates}"
            )
        if self.memory_bytes <= 0:
            raise ValueError(f"topology: memory_bytes must be positive, got {self.memory_bytes}")

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def turn_bytes(self) -> int:
        """What the slowest link carries in `TURN_SECONDS`."""
        return round(self.link.bytes_per_second * TURN_SECONDS)

    @property
    def scatter(self) -> float:
        """By what share another start's prices may differ: that of the kind of request that was measured worst, by
        `BETWEEN_STARTS`."""
        return BETWEEN_STARTS * max((one.scatter for one in self.requests), default=0.0)

    @property
    def link(self) -> Link:
        """The slowest link a message to a random rank may cross."""
        return self.between if self.nodes > 1 else self.inside

    @property
    def slowest_side(self) -> Side:
        return "between" if self.nodes > 1 else "inside"

    def link_of(self, request: str, side: Side) -> Link:
        """The link on that side as this kind of request finds it: as measured, else the link itself."""
        for measured in self.requests:
            if (measured.request, measured.side) == (request, side):
                return measured.link
        return self.inside if side == "inside" else self.between

    def beside_seconds(self, request: str) -> float:
        """`RequestLink.beside_seconds` of this kind, on the side where it is longest; of any kind where this was not
        measured; nothing where one worker has nobody to call."""
        if self.workers == 1:
            return 0.0
        known = {measured.request for measured in self.requests}
        told = [one.beside_seconds for one in self.requests if one.request == request or request not in known]
        return max(told, default=0.0)

    def of(self, workers: int) -> "Topology":
        """The same machines for another number of workers: more or fewer nodes, or one node that holds them all.

        Raises:
            ValueError: they do not fill nodes.
        """
        rates = self.rates if workers == self.workers else ()  # of other ranks nothing is known
        if self.nodes == 1:
            return replace(self, workers_per_node=workers, rates=rates)
        nodes, left = divmod(workers, self.workers_per_node)
        if left or not nodes:
            raise ValueError(
                f"topology: {workers} workers do not fill nodes of {self.workers_per_node}; want a multiple of it"
            )
        return replace(self, nodes=nodes, uneven_hosts=(), rates=rates)

    def of_one_node(self, workers: int) -> "Topology":
        """So many workers side by side."""
        rates = self.rates if workers == self.workers else ()
        return replace(self, nodes=1, workers_per_node=workers, rates=rates)

    def node_of(self, rank: int) -> int:
        return rank // self.workers_per_node

    @property
    def fingerprint(self) -> str:
        """Eight hex digits of what a plan depends on."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    def to_json(self) -> str:
        fields = asdict(self)
        for name in ("uneven_hosts", "rates"):
            if not fields[name]:
                del fields[name]  # so that even machines keep the fingerprint that they had without it
        return json.dumps({"format": FORMAT, **fields}, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Topology":
        """
        Raises:
            ValueError: another format. TypeError, KeyError: the text is JSON, but of no topology.
        """
        fields = json.loads(text)
        if fields.pop("format", 1) != FORMAT:
            raise ValueError(
                f'topology: want "format": {FORMAT}. If an older version wrote this file, measure again; if you did, '
                "add the field"
            )
        fields["requests"] = tuple(
            RequestLink(**{**measured, "link": Link(**measured["link"])}) for measured in fields.get("requests", ())
        )
        if fields.get("processor") is not None:
            fields["processor"] = _processor(fields["processor"])
        fields |= {name: tuple(fields.get(name, ())) for name in ("uneven_hosts", "rates")}
        return cls(**{**fields, "inside": Link(**fields["inside"]), "between": Link(**fields["between"])})

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Topology":
        return cls.from_json(Path(path).read_text())


def turn_bytes_on(topology: Topology | None) -> int:
    """`Topology.turn_bytes`, or what stands for it where nobody knows the links."""
    return TURN_BYTES if topology is None else topology.turn_bytes


def _processor(fields: Mapping[str, Any]) -> Processor:
    gather, merge, add = (RowRate(**fields[name]) for name in ("gather", "merge", "add"))
    coding = tuple(CodingRate(**one) for one in fields.get("coding", ()))
    updates = tuple(UpdateRate(**one) for one in fields.get("updates", ()))
    landing = fields.get("landing_seconds", 0.0)
    return Processor(gather, merge, add, fields["memory_bytes_per_second"], coding, updates, landing)
