"""Times what exchanges that are not exact ask of a processor: their own programs, with answers that come at once.

Every other rank is taken to send what this one sends, so that nothing crosses a link and what is left is coding, adding
and choosing. All ranks do it at once, as in training.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from armillary.exchanges.dense import DenseExchange
from armillary.exchanges.exchange import build_dense, dense_exchanges
from armillary.exchanges.parcel import Parcel, State
from armillary.exchanges.rank_info import RankInfo
from armillary.facts.choice import Choice
from armillary.facts.collectives import AllGather, AllReduce, AllToAll, Request
from armillary.facts.layout import Layout
from armillary.facts.parameter import ParameterFact
from armillary.facts.processor import CodingRate
from armillary.facts.topology import Topology
from armillary.runtime.index_timer import Timer
from armillary.runtime.line import fit

__all__ = ["answer_at_once", "coding_rates"]

TILE = 256  # numbers: pieces of all owners are alike if a multiple of it falls to each
ROWS = 64
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
        line = fit([(1.0, layout.numel / 1e6) for layout in sizes], agreed)
        call, million = line.costs
        rates.append(CodingRate(str(choice), workers, call, million, line.residual))
    return tuple(rates)


def _offered(topology: Topology) -> Iterator[Choice]:
    fact = ParameterFact("w", (ROWS, TILE), "float32", 4 * ROWS * TILE, True, "dense")
    for name, entry in dense_exchanges().items():
        if entry.departs:
            for options in entry.offers(fact, topology):
                if build_dense(name, **options).carries == "gradient":
                    yield Choice(name, dict(options))


def _layout(choice: Choice, workers: int, values: int) -> Layout:
    exchange = build_dense(choice.name, **choice.options)
    columns = TILE * workers * max(1, round(values / (ROWS * TILE * workers)))
    return Layout(("w",), ((ROWS, columns),), "float32", exchange.align, exchange.is_guarded)


class _Pushes:
    """One push after another, each with the state that the one before left."""

    def __init__(self, choice: Choice, layout: Layout, workers: int):
        soon = dense_exchanges()[choice.name].hurried(choice.options)
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
