"""What an exchange is: how one group of tensors crosses the workers, and the registry of those there are.

An exchange is a value that holds functions. Its programs *ask* (`total = yield AllReduce(tensor)`) and touch no
network, so one text is read by the runtime (which starts the request, parks the program and resumes it with the
answer), by `reference/lockstep` (N ranks in one process) and, through its byte prediction, by the planner.

There are two kinds. A `DenseExchange` moves one parcel per worker: the gradients of a group, or its weights. A
`RowExchange` moves rows of a table: `pull` brings the rows a look-up reads, `push` takes the gradients of those rows to
whoever updates them. One more exchange is one more file that registers a factory here, with all that planning must know
of it: when it is worth pricing (`offers`), what it asks of the links (`legs`), and in what it is not exact (`departs`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from armillary.codecs.rows import RowCodes
from armillary.exchanges.dense import DenseExchange, EarlyLegs, Legs, exact_sum
from armillary.exchanges.ownership import Ownership
from armillary.plans.group import Group, checked
from armillary.plans.parcel import RankInfo
from armillary.plans.plan import Consensus
from armillary.plans.profile import ParameterFact
from armillary.plans.registry import Choice, Registry, examples_of, is_theirs, told, why_not_given
from armillary.plans.requests import Program
from armillary.plans.topology import Topology

__all__ = [
    "DENSE",
    "ROW",
    "Counts",
    "DenseExchange",
    "ExchangeEntry",
    "Offers",
    "Pulled",
    "RankInfo",
    "RowExchange",
    "RowTraffic",
    "Staying",
    "build_dense",
    "build_row",
    "consensus_of",
    "dense_exchange",
    "dense_exchanges",
    "row_exchange",
    "row_exchanges",
]


Counts = tuple[int, ...]  # one number per rank


class RowTraffic(NamedTuple):
    """What decides the bytes of a row exchange in one step, as means over the workers.

    Shapes: distinct rows are counted per look-up and added over the `lookups` of a step. `away` is the share of
    a worker's distinct rows that live on another worker.
    """

    distinct_rows: float  # per worker
    node_rows: float  # union over the workers of a node
    row_bytes: int
    lookups: int
    away: float
    item_bytes: int = 4  # of a number; asked where rows are coded


class Pulled(NamedTuple):
    """The rows a look-up brought, and what the push needs to take gradients back the same way.

    rows: (distinct, *row shape); route: opaque to everyone but the exchange that issued it.
    """

    rows: Tensor
    route: Any


class Staying(NamedTuple):
    """What a pull in two goes asks of the runtime.

    which: local rows (n,) -> (n,) bool, those that should not move before they are read.
    is_void: whether some did after all, and all rows must be sent again; the same answer on every rank.
    """

    which: Callable[[Tensor], Tensor]
    is_void: Callable[[], bool]


def _looked_up(pulled: int, pushed: int) -> Mapping[str, int]:
    return {"rows looked up": pulled, "rows with gradients": pushed}


class RowExchange(NamedTuple):
    """How the rows of one table, and the gradients of those rows, cross the workers.

    ownership(rows, place): which worker owns which row; where every worker holds the whole table, itself.
    pull(keys, asked, served, shard, ownership, place): distinct sorted keys, how many of them belong to each rank, and
        how many rows each rank asks of this one -> program that returns `Pulled`.
    push(gradients, routes, ownership, place): gradients of the rows of each route, in order -> program that
        returns (local rows sorted, sum of gradients over workers) for the rows this rank updates.
    push_requests: how many requests a push makes, the same on every rank; the runtime orders launches by it.
    legs(traffic, skew, topology): payload per rank and step, without the headers of look-ups, of a push by request;
        skew: load of the busiest owner over the mean owner's.
    pull_requests: how many requests a pull makes, the same on every rank. The first of them must not read the shard,
        so that it may be made before the rows are final (prefetch).
    pull_early(..., staying): a pull in four requests, each made when the runtime says so: ids; which of the rows stay
        put until they are read; those rows; the others. None where there is no such program.
    early_legs(traffic, skew, staying): the same of `pull_early`, where the share `staying` of the rows stays put.
    mechanisms(pulled, pushed): what it does with rows, in words, and how often: of so many rows that this rank looked
        up, and so many whose gradients it got.
    part(route, said, heard): the route in two, of the rows that are not chosen and of those that are: `said` of the
        rows this rank serves, `heard` of those it asked for, bool in the route's order. None unless a push makes one
        request.
    codes: how rows and their gradients are written on the way, if not as they are.
    """

    placement: str
    ownership: Callable[[int, RankInfo], Ownership]
    pull: Callable[[Tensor, Counts, Counts, Tensor, Ownership, RankInfo], Program[Pulled]]
    push: Callable[[Sequence[Tensor], Sequence[Any], Ownership, RankInfo], Program[tuple[Tensor, Tensor]]]
    push_requests: int
    legs: Callable[[RowTraffic, float, Topology], Legs]
    pull_requests: int
    pull_early: Callable[..., Program[Pulled]] | None = None
    early_legs: Callable[[RowTraffic, float, float], EarlyLegs] | None = None
    part: Callable[[Any, Tensor, Tensor], tuple[Any, Any]] | None = None
    codes: RowCodes = RowCodes()
    mechanisms: Callable[[int, int], Mapping[str, int]] = _looked_up

    def sent_bytes(self, traffic: RowTraffic, topology: Topology) -> float:
        """Payload bytes per rank and step, pull and push together, mean over ranks."""
        legs = self.legs(traffic, 1.0, topology)
        return sum(leg.link_bytes for leg in (*legs.pull, *legs.push))


Options = Mapping[str, Any]
Offers = Callable[[ParameterFact, Topology], Sequence[Options]]


def _plain(fact: ParameterFact, topology: Topology) -> Sequence[Options]:
    return [{}]


class ExchangeEntry(NamedTuple):
    """A registered factory.

    examples: sets of options that contract tests use. offers(fact, topology): those worth pricing for a parameter;
        none of a baseline, which is taken only where it is demanded.
    owner_option: the option that names its owner (a rank, of a dense exchange, whose parameters then go one by one) or
        the number of its owners (of a row exchange); empty where there is none to choose.
    departs: in what it is not exact, words of `plans/group.py`; it is then taken only where it is demanded.
    costs: one sentence on what that does.
    mildness: how much of the values one push leaves out, beside other methods: the least is the mildest.
    soon: by option, the most with which everything it does is done in a few steps of a small model; `verify` lowers
        such options to that.
    coded_by: of a row exchange, the options that name codecs of what crosses.
    """

    make: Callable[..., Any]
    examples: tuple[Options, ...]
    offers: Offers = _plain
    owner_option: str = ""
    departs: tuple[str, ...] = ()
    costs: str = ""
    mildness: int = 0
    soon: Mapping[str, int] = MappingProxyType({})
    coded_by: tuple[str, ...] = ()

    def shortened(self, options: Options) -> Options:
        """These options, lowered; one that is not given is what the factory takes for it."""
        taken = {name: one.default for name, one in signature(self.make).parameters.items()}
        now = {name: options.get(name, taken.get(name, most + 1)) for name, most in self.soon.items()}
        return {**options, **{name: self.soon[name] for name, value in now.items() if value > self.soon[name]}}


DENSE: Registry[ExchangeEntry] = Registry("dense exchange", "armillary.exchanges")
ROW: Registry[ExchangeEntry] = Registry("row exchange", "armillary.exchanges")
Factory = TypeVar("Factory", bound=Callable[..., Any])


def dense_exchange(
    *examples: Options,
    offers: Offers = _plain,
    owner_option: str = "",
    departs: tuple[str, ...] = (),
    costs: str = "",
    mildness: int = 0,
    soon: Mapping[str, int] = MappingProxyType({}),
) -> Callable[[Factory], Factory]:
    """Registers a factory of dense exchanges under its own name; arguments as in `ExchangeEntry`.

    Raises:
        ValueError: a departure that is none of `plans/group.py`, or another exchange has that name.
    """
    fields = (examples_of("dense_exchange", examples), offers, owner_option, checked(departs), costs, mildness, soon)
    return partial(_register, DENSE, fields)


def row_exchange(
    *examples: Options, offers: Offers = _plain, owner_option: str = "", coded_by: tuple[str, ...] = ()
) -> Callable[[Factory], Factory]:
    """Registers a factory of row exchanges under its own name; arguments as in `ExchangeEntry`."""
    tried = examples_of("row_exchange", examples)
    fields: tuple[Any, ...] = (tried, offers, owner_option, (), "", 0, MappingProxyType({}), coded_by)
    return partial(_register, ROW, fields)


def _register(shelf: Registry[ExchangeEntry], fields: tuple[Any, ...], make: Factory) -> Factory:
    shelf.register(make.__name__, ExchangeEntry(make, *fields))
    return make


def dense_exchanges() -> Mapping[str, ExchangeEntry]:
    """Every dense exchange there is, by name, in the order of names."""
    return DENSE.all()


def row_exchanges() -> Mapping[str, ExchangeEntry]:
    """Every row exchange there is, by name, in the order of names."""
    return ROW.all()


def build_dense(name: str, **options: Any) -> DenseExchange:
    """
    Raises:
        ValueError: no such exchange, or no such option; the message lists those that exist. Or it is lossy, and has no
            oracle. Or somebody's own factory raises.
    """
    entry = DENSE[name]
    made: DenseExchange = _made(entry, Choice(name, options))
    if "lossy" in entry.departs and made.oracle is exact_sum:
        raise ValueError(
            f"exchange: {name} is lossy, but has no oracle, so nobody knows what it means; want "
            "DenseExchange(..., oracle=...), a function of all ranks' parcels and states"
        )
    return made


def build_row(name: str, **options: Any) -> RowExchange:
    """
    Raises:
        ValueError: no such exchange, or no such option; the message lists those that exist. Or somebody's own factory
            raises.
    """
    made: RowExchange = _made(ROW[name], Choice(name, options))
    return made


def _made(entry: ExchangeEntry, choice: Choice) -> Any:
    if why := why_not_given(entry.make, choice.options):
        raise ValueError(f"exchange: {choice.name} refuses options {dict(choice.options)}: {why}")
    make = told(f"exchange {choice} cannot be made", entry.make) if is_theirs(entry.make) else entry.make
    return make(**choice.options)


def consensus_of(ordered: Iterable[Group]) -> Consensus:
    """What the model is between two steps: with replicas that differ, their mean."""
    dense = [group.own_exchange for group in ordered if group.own_exchange.name in dense_exchanges()]
    alike = all(build_dense(one.name, **one.options).keeps_replicas_alike for one in dense)
    return "same" if alike else "mean"
