"""Times work of this device: rows gathered, merged and added, small tensors in an optimizer's step, and coding.

The functions of `exchanges/owned_rows.py` and the exchanges' own programs are timed, on drawn ids and with answers that
come at once. All ranks work at once: they share cores, caches and memory in training too. Where ranks are more than
cores, a call that is shorter than a turn looks as fast as on an idle machine. So calls are timed in blocks that take
many turns, and their mean counts.

A tensor costs time however small it is: what a transformer stage's bytes take was a third of the optimizer's step, and
the rest were calls, 40 a tensor with Adam.

Measured times are fitted by a line without negative costs. Amounts differ by orders of magnitude, so errors are
relative: plain least squares would hardly see the latency.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.dense import DenseExchange
from armillary.exchanges.exchange import build_dense, dense_exchanges
from armillary.exchanges.owned_rows import merge_rows
from armillary.plans.parcel import Layout, Parcel, RankInfo, State
from armillary.plans.profile import ParameterFact
from armillary.plans.registry import Choice
from armillary.plans.requests import AllGather, AllReduce, AllToAll, Request
from armillary.plans.topology import CodingRate, Processor, RowRate, Topology, UpdateRate

__all__ = [
    "LinearFit",
    "Timer",
    "answer_at_once",
    "coding_rates",
    "landing_seconds",
    "linear_fit",
    "processor",
    "update_rates",
]


class LinearFit(NamedTuple):
    """costs: one per column. residual: largest relative error over the times it was fitted to."""

    costs: tuple[float, ...]
    residual: float


def linear_fit(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> LinearFit:
    """Least relative squares with no cost below zero: the best of the fits in which some costs are held at zero.

    Args:
        amounts: a row per time, for example (messages, bytes). seconds: the times, above zero.

    Raises:
        ValueError: fewer times than columns, or a time that is not above zero.
    """
    table, times = np.array(amounts, dtype=float), np.array(seconds, dtype=float)
    if table.ndim != 2 or len(table) != len(times) or len(times) < table.shape[1] or not (times > 0).all():
        raise ValueError(f"line: want a row of amounts per time and times above 0, got {amounts} and {seconds}")
    relative, ones = table / times[:, None], np.ones_like(times)
    scale = np.abs(relative).max(axis=0)
    relative = relative / np.where(scale > 0, scale, 1.0)
    columns = range(table.shape[1])
    best, best_square = np.zeros(len(columns)), np.inf
    for count in columns:
        for kept in combinations(columns, count + 1):
            costs = np.zeros(len(columns))
            costs[list(kept)] = np.linalg.lstsq(relative[:, list(kept)], ones, rcond=None)[0]
            square = float(((relative @ costs - ones) ** 2).sum())
            if costs.min() >= 0 and square < best_square:
                best, best_square = costs, square
    residual = float(np.abs(relative @ best - ones).max())
    return LinearFit(tuple((best / np.where(scale > 0, scale, 1.0)).tolist()), residual)


ROWS = (256, 4096)
WIDTHS = (16, 256)  # float32 elements of a row
TABLE_BYTES = 1 << 24  # more than caches hold, as tables worth splitting are
ITEM_BYTES = 4
SHARED = 2  # ranks that ask an owner for the same row, on average
COPIED_BYTES = 1 << 25
MOST_CALLS = 1000

Agree = Callable[[Sequence[float]], list[float]]


def processor(device: torch.device, block_seconds: float, agree: Agree) -> Processor:
    """The rates of this device.

    Args:
        block_seconds: of a rank alone, for each kind and size.
        agree: this rank's times -> those to be used, the same on every rank (the slowest rank's); ranks go on together.
    """
    sizes = list(product(ROWS, WIDTHS))
    timer = Timer(block_seconds, agree, device)
    works = [_works(rows, width, timer) for rows, width in sizes]
    source = torch.ones(COPIED_BYTES // ITEM_BYTES, device=device)
    target = torch.ones_like(source)
    copied = timer.seconds(lambda: target.copy_(source))
    agreed = agree([*(seconds for kind in zip(*works) for seconds in kind), copied])
    amounts = [(1.0, float(rows), float(rows * width * ITEM_BYTES)) for rows, width in sizes]
    count = len(sizes)
    gather, merge, add = (_rate(amounts, agreed[first : first + count]) for first in range(0, 3 * count, count))
    return Processor(gather, merge, add, memory_bytes_per_second=2 * COPIED_BYTES / agreed[-1])


def _works(rows: int, width: int, timer: "Timer") -> tuple[float, float, float]:
    """Seconds to gather, merge and add so many rows of so many elements."""
    generator, device = torch.Generator().manual_seed(0), timer.device
    table = torch.ones(TABLE_BYTES // ITEM_BYTES // width, width, device=device)  # zeros would share one page
    ids = torch.randint(len(table), (rows,), generator=generator).to(device)
    twice = torch.randint(max(1, rows // SHARED), (rows,), generator=generator).to(device)
    gradients = torch.ones(rows, width, device=device)
    return (
        timer.seconds(lambda: table.index_select(0, ids)),
        timer.seconds(lambda: merge_rows(twice, gradients)),
        timer.seconds(lambda: table.index_add_(0, ids, gradients)),
    )


def _rate(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> RowRate:
    line = linear_fit(amounts, seconds)
    call, row, byte = line.costs
    return RowRate(call, row, byte, line.residual)


@dataclass(frozen=True)
class Timer:
    """Times work that all ranks do at once; arguments as in `processor`."""

    block_seconds: float
    agree: Agree
    device: torch.device

    def seconds(self, work: Callable[[], object]) -> float:
        """Mean of a block of calls after one that warms up. Every rank makes as many, and begins with the others."""
        self._block(work, 1)
        (once,) = self.agree([self._block(work, 1)])
        calls = min(MOST_CALLS, max(1, round(self.block_seconds / once)))
        return self._block(work, calls) / calls

    def _block(self, work: Callable[[], object], calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return max(time.perf_counter() - began, 1e-9)


TENSORS = 32
SMALL, LARGE = 16, 1 << 14  # elements: all of the large ones, with gradients and state, are more than a cache holds


def update_rates(timer: Timer) -> tuple[UpdateRate, ...]:
    """Of SGD, with momentum, of Adam: by how many tensors of state they keep. Every rank gets the same."""

    def step(make: Callable[[list[nn.Parameter]], Optimizer], elements: int) -> float:
        return timer.seconds(make(_learnt(timer, elements)).step) / TENSORS

    makes: tuple[Callable[[list[nn.Parameter]], Optimizer], ...] = (
        partial(torch.optim.SGD, lr=0.0),
        partial(torch.optim.SGD, lr=0.0, momentum=0.9),
        partial(torch.optim.Adam, lr=0.0),
    )
    found = timer.agree([step(make, elements) for make in makes for elements in (SMALL, LARGE)])
    sizes = [(1.0, float(elements * ITEM_BYTES)) for elements in (SMALL, LARGE)]
    return tuple(UpdateRate(*linear_fit(sizes, found[first : first + 2]).costs) for first in range(0, len(found), 2))


def landing_seconds(timer: Timer) -> float:
    """Of one gradient that is added to a sum as soon as backward has made it (`stages/stage_pass.py`), beyond
    one that is left where it is."""
    leaves = _learnt(timer, SMALL)
    sums = {id(leaf): torch.zeros_like(leaf) for leaf in leaves}
    out = torch.stack([leaf.sum() for leaf in leaves]).sum()

    def back() -> None:
        torch.autograd.backward(out, inputs=leaves, retain_graph=True)

    def left() -> None:
        back()
        for leaf in leaves:
            leaf.grad = None

    def add(leaf: Tensor) -> None:
        if leaf.grad is not None:
            sums[id(leaf)].add_(leaf.grad)
            leaf.grad = None

    def landed() -> None:
        hooks = [leaf.register_post_accumulate_grad_hook(add) for leaf in leaves]
        back()
        for hook in hooks:
            hook.remove()

    return max(0.0, timer.seconds(landed) - timer.seconds(left)) / TENSORS


def _learnt(timer: Timer, elements: int) -> list[nn.Parameter]:
    """Parameters with gradients."""
    made = [nn.Parameter(torch.zeros(elements, device=timer.device)) for _ in range(TENSORS)]
    for one in made:
        one.grad = torch.zeros_like(one)
    return made


TILE = 256  # numbers: pieces of all owners are alike if a multiple of it falls to each
CODED_ROWS = 64
VALUES = (1 << 16, 1 << 20)  # about; two sizes tell a call from its values
BEFORE = 3  # pushes before those that are timed: whatever a method does only at its start
MOST_WORKERS = 16  # are taken to answer; what more add is priced by the exchange's own work


def coding_rates(topology: Topology, timer: Timer) -> tuple[CodingRate, ...]:
    """Of every exchange that departs and is offered, with the options it is offered with."""
    workers = min(MOST_WORKERS, max(2, topology.workers))
    rates = []
    for choice in _offered(topology):
        sizes = [_layout(choice, workers, values) for values in VALUES]
        seconds = [timer.seconds(_Pushes(choice, layout, workers)) for layout in sizes]
        agreed = timer.agree(seconds)
        line = linear_fit([(1.0, layout.numel / 1e6) for layout in sizes], agreed)
        call, million = line.costs
        rates.append(CodingRate(str(choice), workers, call, million, line.residual))
    return tuple(rates)


def _offered(topology: Topology) -> Iterator[Choice]:
    fact = ParameterFact("w", (CODED_ROWS, TILE), "float32", 4 * CODED_ROWS * TILE, True, "dense")
    for name, entry in dense_exchanges().items():
        if entry.departs:
            for options in entry.offers(fact, topology):
                if build_dense(name, **options).carries == "gradient":
                    yield Choice(name, dict(options))


def _layout(choice: Choice, workers: int, values: int) -> Layout:
    exchange = build_dense(choice.name, **choice.options)
    columns = TILE * workers * max(1, round(values / (CODED_ROWS * TILE * workers)))
    return Layout(("w",), ((CODED_ROWS, columns),), "float32", exchange.align, exchange.is_guarded)


class _Pushes:
    """One push after another, each with the state that the one before left."""

    def __init__(self, choice: Choice, layout: Layout, workers: int):
        soon = dense_exchanges()[choice.name].shortened(choice.options)
        self.exchange: DenseExchange = build_dense(choice.name, **soon)
        self.place = RankInfo(0, workers)
        values = torch.randn(layout.numel, generator=torch.Generator().manual_seed(1))
        tail = torch.zeros(layout.tail, dtype=torch.float64)
        tail[0] = 1.0
        self.parcel = Parcel(values, tail, layout)
        self.state: State = self.exchange.begin(layout, self.place, values)
        for _ in range(BEFORE):
            self()

    def __call__(self) -> None:
        program, answer = self.exchange.push(self.parcel, self.state, self.place), None
        while True:
            try:
                answer = answer_at_once(program.send(answer), self.place.workers)
            except StopIteration as stop:
                self.state = stop.value[1]
                return


def answer_at_once(request: Request, workers: int) -> Any:
    """What rank 0 hears if all ranks ask what it asks."""
    tensor: Tensor = request.tensor
    if isinstance(request, AllReduce):
        return tensor * workers
    if isinstance(request, AllGather):
        return tensor.expand(workers, *tensor.shape).contiguous()
    assert isinstance(request, AllToAll)
    return torch.cat([tensor[: request.send[0]]] * workers)
