"""The contract of a dense exchange, held against ranks in one process: which of its rules are broken, in words.

Tests hold every exchange of the package to it, and `check` one of the user's own. A rule says where it broke first.
"""

import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from armillary.exchanges.dense import DenseExchange, Leg, Links, PushResult, Resharding, exact_sum
from armillary.plans.parcel import Layout, Parcel, RankInfo, State
from armillary.plans.requests import AllGather, AllReduce, Program, Request, asked_by
from armillary.plans.topology import Link, Topology
from armillary.reference import lockstep

__all__ = ["EXCHANGE_RULES", "NotAsked", "is_the_sum", "rules_of"]

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64")
LINK = Link(1e-4, 1e8)


class Shape(NamedTuple):
    """Of a job."""

    workers: int
    per_node: int


SHAPES = (Shape(1, 1), Shape(2, 1), Shape(3, 1), Shape(8, 1), Shape(2, 2), Shape(4, 2), Shape(6, 3))
LARGE, LARGE_GUARDED = Shape(200, 2), Shape(24, 2)  # more ranks than a byte counts


def layout_for(exchange: DenseExchange, dtype: str = "float64") -> Layout:
    return Layout(("a", "b", "c"), ((3, 3), (), (3,)), dtype, exchange.align, exchange.is_guarded)


def parcels_for(layout: Layout, workers: int) -> list[Parcel]:
    """Each with other values and other flags; the second parameter is used by nobody."""
    generator = torch.Generator().manual_seed(workers)
    found = []
    for rank in range(workers):
        values = torch.zeros(layout.numel, dtype=getattr(torch, layout.dtype))
        for begin, end in layout.spans:
            values[begin:end] = torch.randn(end - begin, generator=generator, dtype=torch.float64)
        used = [1.0, 0.0, float(rank % 2)][: len(layout.names)]
        tail = torch.tensor(used + [0.0] * layout.is_guarded, dtype=torch.float64)
        found.append(Parcel(values, tail, layout))
    return found


def states_for(exchange: DenseExchange, layout: Layout, workers: int) -> list[State]:
    weights = torch.zeros(layout.numel, dtype=getattr(torch, layout.dtype))
    return [exchange.begin(layout, RankInfo(rank, workers), weights) for rank in range(workers)]


class LandedPush(NamedTuple):
    """By rank: results with next states, and bytes sent."""

    moved: Sequence[PushResult]
    sent: Sequence[float]


class NotAsked(ValueError):
    """A function of an exchange gives what nobody asked of it."""


def programs_of(exchange: DenseExchange, layout: Layout, shape: Shape) -> list[Program[PushResult]]:
    """The first push of every rank of a job, each request and each answer looked at."""
    places = [RankInfo(rank, *shape) for rank in range(shape.workers)]
    given = zip(parcels_for(layout, shape.workers), states_for(exchange, layout, shape.workers), places, strict=True)
    return [_looked_at(exchange.push(*one)) for one in given]


def _looked_at(program: Any) -> Program[PushResult]:
    if not isinstance(program, Generator):
        raise NotAsked(f"push must be a generator, which yields requests; it returned {_kind(program)}")

    def ask(request: Any) -> Program[Any]:
        if not isinstance(request, Request):
            raise NotAsked(f"push must yield AllReduce, AllGather or AllToAll; it yielded {_kind(request)}")
        answer = yield request
        return answer

    moved: Any = yield from asked_by(program, ask)
    is_pair = isinstance(moved, tuple) and len(moved) == 2
    if not is_pair or not isinstance(moved[0], Parcel) or not isinstance(moved[1], dict):
        raise NotAsked(f"push must return (parcel, state); it returned {_kind(moved)}")
    return moved[0], moved[1]


def seen_from_above(exchange: DenseExchange, layout: Layout, workers: int) -> list[PushResult]:
    """What the oracle says of the first push, by rank."""
    if exchange.oracle is None:
        raise NotAsked("an exchange that is not the exact sum wants oracle=(parcels, states) -> (results, next states)")
    found: Any = exchange.oracle(parcels_for(layout, workers), states_for(exchange, layout, workers))
    is_pair = isinstance(found, tuple) and len(found) == 2 and all(isinstance(one, list | tuple) for one in found)
    if not is_pair or not len(found[0]) == len(found[1]) == workers:
        raise NotAsked(f"oracle must return (parcels, states), one of each for a rank; it returned {_kind(found)}")
    return list(zip(*found, strict=True))


def _kind(given: Any) -> str:
    if isinstance(given, list | tuple) and not hasattr(given, "_fields"):
        said = ", ".join(map(_kind, given[:4]))
        return f"[{said}]" if isinstance(given, list) else f"({said})"
    return "None" if given is None else type(given).__name__


def _truth(exchange: DenseExchange) -> str:
    return "the exact sum" if exchange.oracle is exact_sum else "the oracle"


def pushed(exchange: DenseExchange, layout: Layout, shape: Shape) -> LandedPush:
    """The first push of all ranks of a job."""
    return LandedPush(*lockstep.run(programs_of(exchange, layout, shape), shape.per_node))


def means_what_its_oracle_says(exchange: DenseExchange) -> str:
    layout, truth = layout_for(exchange), _truth(exchange)
    for shape in SHAPES:
        found = zip(
            pushed(exchange, layout, shape).moved, seen_from_above(exchange, layout, shape.workers), strict=True
        )
        for rank, (got, want) in enumerate(found):
            if how := _apart(got, want, truth):
                return f"{_said(shape)}, rank {rank}: {how}"
    return ""


def _apart(got: PushResult, want: PushResult, truth: str) -> str:
    (result, state), (wanted, wanted_state) = got, want
    if result.values.shape != wanted.values.shape:
        return f"push gives {len(result.values)} numbers, {truth} {len(wanted.values)}"
    if not _near(result.values, wanted.values):
        at = int((~torch.isclose(result.values, wanted.values, rtol=1e-12, atol=1e-12)).nonzero()[0])
        mine, theirs = result.values[at].item(), wanted.values[at].item()
        first = f"first number {at}: {mine:.6g} instead of {theirs:.6g}, off by {abs(mine - theirs):.3g}"
        return f"push gives {_few(result.values)}, {truth} {_few(wanted.values)}; {first}"
    if not torch.equal(result.tail, wanted.tail):
        return f"push gives the tail {result.tail.tolist()}, {truth} {wanted.tail.tolist()}"
    if state.keys() != wanted_state.keys():
        return f"push leaves a state of {sorted(state)}, {truth} of {sorted(wanted_state)}"
    others = [name for name, value in state.items() if not _near(value, wanted_state[name])]
    return f"push leaves another state than {truth}: {', '.join(others)}" if others else ""


def is_the_sum(exchange: DenseExchange) -> str:
    """Asked of an exchange that departs from nothing."""
    layout = layout_for(exchange)
    total = torch.stack([parcel.values for parcel in parcels_for(layout, 3)]).sum(0)
    results = [result for result, _ in seen_from_above(exchange, layout, 3)]
    others = [one.values for one in results if not torch.allclose(one.values, total, rtol=1e-7, atol=1e-7)]
    return f"it departs from nothing, but its oracle gives {_few(others[0])} for {_few(total)}" if others else ""


def brings_the_tail_exactly(exchange: DenseExchange) -> str:
    """Whatever the values are, and however many ranks add up to more than their dtype counts to. Nobody reads the tail
    of weights: they take the place of this rank's, whoever used them."""
    for dtype in (taken := [one for one in DTYPES if not exchange.refuses(layout_for(exchange, one))]):
        jobs = [(layout_for(exchange, dtype), shape) for shape in SHAPES]
        if dtype == ("bfloat16" if "bfloat16" in taken else taken[0]):  # one tensor will do: 200 ranks take long
            one = Layout(("a",), ((3,),), dtype, exchange.align, exchange.is_guarded)
            jobs.append((one, LARGE_GUARDED if exchange.is_guarded else LARGE))
        for layout, shape in jobs:
            total = torch.stack([parcel.tail for parcel in parcels_for(layout, shape.workers)]).sum(0)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                moved = pushed(exchange, layout, shape).moved
            if any("imaginary" in str(one.message) for one in told):
                return (
                    f"values in {dtype}: push drops their imaginary part; keep it, or refuse such a layout in `refuses`"
                )
            for result, _ in moved:
                if result.values.dtype != getattr(torch, dtype) or result.tail.dtype != torch.float64:
                    return f"values in {dtype}: they arrive in {result.values.dtype}, the tail in {result.tail.dtype}"
                if exchange.carries == "gradient" and not torch.equal(result.tail, total):
                    return f"values in {dtype}, {_said(shape)}: {_few(result.tail)} arrives for {_few(total)}"
    return ""


def sends_what_it_says(exchange: DenseExchange) -> str:
    layout = layout_for(exchange, "float32")
    for shape in SHAPES:
        topology = Topology(shape.workers // shape.per_node, shape.per_node, LINK, LINK, 1 << 30)
        sent = pushed(exchange, layout, shape).sent
        if exchange.most_bytes is None:
            said = _sent_bytes(exchange, layout, topology)
            is_right = all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(sent, said, strict=True))
        else:
            said = exchange.most_bytes(layout, topology)
            is_right = all(a <= most for a, most in zip(sent, said, strict=True))
        if not is_right:
            return f"{_said(shape)}: ranks send {sent} bytes, it says {said}"
    return ""


def asks_alike_and_no_more_than_it_says(exchange: DenseExchange) -> str:
    layout = layout_for(exchange)
    for shape in SHAPES:
        asked: list[list[Request]] = [[] for _ in range(shape.workers)]
        programs = programs_of(exchange, layout, shape)
        lockstep.run([_written_down(*one) for one in zip(programs, asked, strict=True)], shape.per_node)
        counted = list(map(len, asked))
        if len(set(counted)) > 1 or counted[0] > exchange.requests:
            return f"{_said(shape)}: ranks make {counted} requests, it says {exchange.requests} at most"
    return ""


def says_legs_as_it_asks(exchange: DenseExchange) -> str:
    """More may be said than is asked: a leg that waits for nobody here may do so elsewhere."""
    layout = layout_for(exchange, "float32")
    for shape in SHAPES[1:]:
        topology = Topology(shape.workers // shape.per_node, shape.per_node, LINK, LINK, 1 << 30)
        asked = list[Request]()
        first, *others = programs_of(exchange, layout, shape)
        lockstep.run([_written_down(first, asked), *others], shape.per_node)
        legs, kinds = _legs(exchange, layout, topology), sorted({type(one).__name__ for one in asked})
        if strange := sorted({str(leg.links) for leg in legs} - {*get_args(Links)}):
            return f"no link of a leg is called {', '.join(strange)}; want {', '.join(get_args(Links))}"
        if kinds != (said := sorted({leg.request for leg in legs})):
            return f"{_said(shape)}: legs are of {said}, requests of {kinds}"
        messages, counted = sum(leg.messages for leg in legs), sum(_messages(one, shape) for one in asked)
        if messages < counted:
            return f"{_said(shape)}: legs have {messages:g} messages that wait for one another, requests {counted}"
        through, most = sum(leg.link_bytes for leg in legs), max(_sent_bytes(exchange, layout, topology))
        if through < most * (1 - 1e-6):
            return f"{_said(shape)}: legs carry {through:g} bytes, but a rank sends {most:g}"
    return ""


def _sent_bytes(exchange: DenseExchange, layout: Layout, topology: Topology) -> list[float]:
    found: Any = exchange.sent_bytes(layout, topology)
    if not isinstance(found, list | tuple) or len(found) != topology.workers:
        raise NotAsked(f"sent_bytes must give one number a rank, {topology.workers} here; it gave {_kind(found)}")
    return list(found)


def _legs(exchange: DenseExchange, layout: Layout, topology: Topology) -> list[Leg]:
    found: Any = exchange.legs(layout, topology)
    if not isinstance(found, list | tuple) or not all(isinstance(leg, Leg) for leg in found):
        raise NotAsked(f"legs must give a list of Leg; it gave {_kind(found)}")
    return list(found)


def _messages(request: Request, shape: Shape) -> int:
    """That wait for one another: of a ring, and of one that all ranks send at once."""
    ranks = {"node": shape.per_node, "rail": shape.workers // shape.per_node}.get(request.scope, shape.workers)
    if isinstance(request, AllReduce):
        return 2 * (ranks - 1)
    return ranks - 1 if isinstance(request, AllGather) else int(ranks > 1)


def _written_down(program: Program[PushResult], asked: list[Request]) -> Program[PushResult]:
    def ask(request: Request) -> Program[Any]:
        asked.append(request)
        answer = yield request
        return answer

    return asked_by(program, ask)


def leaves_the_state_it_was_given(exchange: DenseExchange) -> str:
    """Twice, as a state often begins with zeros, which much leaves as they are."""
    layout, shape = layout_for(exchange), Shape(2, 1)
    states = states_for(exchange, layout, 2)
    places = [RankInfo(rank, *shape) for rank in range(2)]
    for _ in range(2):
        before = [{name: value.clone() for name, value in state.items()} for state in states]
        given = zip(parcels_for(layout, 2), states, places, strict=True)
        moved = lockstep.run([_looked_at(exchange.push(*one)) for one in given])[0]
        both = list(zip(states, before, strict=True))
        changed = {name for state, was in both for name in was if not torch.equal(state[name], was[name])}
        if changed:
            return f"push changes {', '.join(sorted(changed))} in place; give a next state instead"
        states = [state for _, state in moved]
    return ""


def keeps_its_state_by_parameter(exchange: DenseExchange) -> str:
    layout, ways = layout_for(exchange), get_args(Resharding)
    for entry, way in exchange.resharding.items():
        if way not in ways:
            return f"resharding of {entry!r} is {way!r}; want one of {', '.join(ways)}"
    first = states_for(exchange, layout, 2)
    after = [state for _, state in pushed(exchange, layout, Shape(2, 1)).moved]
    found = [exchange.misfit(layout, state) for state in (*first, *after)]
    return next(filter(None, found), "")


def _near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def _few(values: Tensor) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values[:4].tolist())
    return f"[{shown}{', ...' if len(values) > 4 else ''}]"


def _said(shape: Shape) -> str:
    return f"{shape.workers} workers, {shape.per_node} a node"


TAIL, DTYPE = "the tail arrives exactly, whatever the values are", "values arrive in their dtype"

EXCHANGE_RULES: Mapping[str, Callable[[DenseExchange], str]] = {
    "a push means what the oracle says, values, tail and state": means_what_its_oracle_says,
    TAIL: brings_the_tail_exactly,
    "as many bytes are sent as it says": sends_what_it_says,
    "every rank makes as many requests as the others, and no more than it says": asks_alike_and_no_more_than_it_says,
    "its legs are of the requests it makes, with no fewer messages and bytes": says_legs_as_it_asks,
    "a push leaves the state that it was given": leaves_the_state_it_was_given,
    "a state has a number for each value, or as many as `counts` says": keeps_its_state_by_parameter,
}


def rules_of(exchange: DenseExchange) -> Mapping[str, Callable[[DenseExchange], str]]:
    """Those that are asked of it."""
    if exchange.carries == "gradient":
        return EXCHANGE_RULES
    return {DTYPE if rule == TAIL else rule: broken_by for rule, broken_by in EXCHANGE_RULES.items()}
