"""One round of look-ups: every rank says which table it wants to read, one table is served, everyone takes part.

Ranks need not look up the same tables, nor equally often. A look-up repeats rounds until its own table was served. A
rank that has none to make (it reached its backward, or has finished) takes part with an idle request until all are
idle. So a rank that never reads a table never blocks the rest.

The header that every rank sends to every other has the request, how many rows it wants of the receiver, whether their
gradients will come back, the sender's step and the weight of its batch. An idle rank says instead to which tables its
backward will bring a gradient. So all ranks know before a push which tables nobody learns from, and leave them alone as
one process does.

Where tables prefetch, more columns ride on the headers (`announcement_columns`). Columns 0 and 1 are of an idle sender:
bits of the predicted look-ups that it has made in this batch, and of those of the next batch for which it sent rows
that moved since. Then come, of a batch to come, bits of the look-ups that the sender predicts, how many bytes of rows
they bring, and how many rows of the receiver each will want. So counts need no message of their own. Numbers are
float64: exact for integers below 2**53.
"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from armillary.exchanges.dense import Leg
from armillary.exchanges.exchange import Pulled, RowExchange
from armillary.exchanges.ownership import Ownership
from armillary.plans.parcel import RankInfo
from armillary.plans.requests import AllToAll, Program
from armillary.plans.topology import Topology

__all__ = [
    "BITS",
    "BYTES",
    "FIELDS",
    "FIRST_COUNT",
    "FLAGS",
    "HEADER_BYTES",
    "MADE",
    "MOVED",
    "PREDICTED",
    "STEP",
    "LookupRequest",
    "LookupRound",
    "LookupTable",
    "State",
    "announcement_bytes",
    "announcement_columns",
    "look_up",
    "most_of_each",
    "round_leg",
]

MADE, MOVED = 0, 1
BITS, BYTES = 2, 3
FIRST_COUNT = 4
PREDICTED = 52  # look-ups of a batch that may be predicted: their bits travel in one float64


def most_of_each(tables: int) -> int:
    """How many look-ups of each of so many tables may be predicted in one batch."""
    return min(4, PREDICTED // max(1, tables))


def announcement_columns(tables: int) -> int:
    """Numbers for each rank, where so many tables prefetch."""
    return FIRST_COUNT + min(tables, PREDICTED) * most_of_each(tables) if tables else 0


def announcement_bytes(tables: int) -> int:
    """The same on every header."""
    return 8 * announcement_columns(tables)


FIELDS = 5  # columns of a header
STEP = 3  # which of them is the sender's step
HEADER_BYTES = FIELDS * 8  # float64: exact for every integer below 2**53
FLAGS = 52  # tables that an idle rank can speak of in one round
State = Literal["idle", "finished", "asking", "evaluated", "aside", "late"]  # of a rank that asks for no table
_IDLE = 0
_CODES: dict[State, int] = {"idle": _IDLE, "finished": -1, "asking": -2, "evaluated": -3, "aside": -4, "late": -5}
_DOING = {
    _IDLE: "run a backward",
    -1: "have finished",
    -2: "ask for a norm, sum or other value of a whole table",
    -3: "are in run.evaluate",
    -4: "are in a call between two steps (run.save, load, report, ema or export)",
    -5: "are in optimizer.step() after a backward that reached no parameter on some rank",
}


class LookupTable(NamedTuple):
    """A row-sharded table as a round sees it. shard: (local rows, *row shape)."""

    name: str
    exchange: RowExchange
    ownership: Ownership
    shard: Tensor


class LookupRequest(NamedTuple):
    """What this rank wants of the round.

    table: index of a table; or "idle" (this rank is in its backward), "finished" (it will train no more), "asking"
        (it wants a value of a whole table, of which every rank tells a part), "evaluated" (it has no batch left), or
        "aside" (it is in a call that all ranks make between two steps), or "late" (it steps, and the backward of some
        rank reached no parameter).
    keys: sorted distinct keys (see `Ownership.keys`); empty unless a table is asked for.
    flags: of an idle rank: bit i is set if it will push gradients of the i-th table spoken of.
    word: of an idle rank: a whole number below 2**53 that all are told.
    extra: (ranks, n) float64, what rides on the header to each rank.
    """

    table: int | State
    keys: Tensor
    needs_gradient: bool
    step: int
    weight: float = 1.0
    flags: int = 0
    word: int = 0
    extra: Tensor | None = None


class LookupRound(NamedTuple):
    """What came of it.

    table: index of the table that was served, or None when no rank asked for one.
    pulled: what this rank got of it (no rows if it did not ask). needs_gradient: the askers will push gradients.
    weights: the weight each rank declared. flags, words: those of all ranks together, and each rank's, when no rank
        asked for a table.
    """

    table: int | None
    pulled: Pulled | None
    mine: bool
    needs_gradient: bool
    weights: tuple[float, ...]
    flags: int = 0
    words: tuple[int, ...] = ()


def round_leg(rounds: float, topology: Topology, extra_bytes: int = 0) -> Leg:
    """The headers of so many rounds, on each of which so many bytes ride."""
    nbytes = HEADER_BYTES + extra_bytes
    return Leg("everyone", rounds * nbytes * (topology.workers - 1), rounds)


def look_up(request: LookupRequest, tables: Sequence[LookupTable], place: RankInfo) -> Program[LookupRound]:
    """One round. All ranks must hold the same tables in the same order.

    Raises:
        RuntimeError: ranks are at different steps, or some have finished while others still train.
    """
    code = _CODES[request.table] if isinstance(request.table, str) else request.table + 1
    asked, second = (request.flags,) * place.workers, request.word
    if isinstance(request.table, int):
        asked, second = tuple(tables[request.table].ownership.counts(request.keys)), int(request.needs_gradient)
    mine = torch.tensor([[code, second, count, request.step, request.weight] for count in asked], dtype=torch.float64)
    ones = (1,) * place.workers
    told = mine if request.extra is None else torch.cat([mine, request.extra], 1)
    heard = yield AllToAll(told, ones, ones)
    headers = heard[:, :FIELDS].tolist()
    columns = list(zip(*headers, strict=True))
    wanted = [int(code) for code in columns[0]]
    if max(wanted) <= _IDLE:
        _refuse_out_of_step(wanted, [int(step) for step in columns[STEP]])
        flags, words = reduce(or_, map(int, columns[2])), tuple(map(int, columns[1]))
        return LookupRound(None, None, False, False, columns[4], flags, words)
    # Reads with and without gradient are served apart, so that a route speaks of one kind only.
    chosen = min((header[0], header[1]) for header in headers if header[0] > _IDLE)
    table, needs_gradient = tables[int(chosen[0]) - 1], bool(chosen[1])
    served = tuple(int(header[2]) if (header[0], header[1]) == chosen else 0 for header in headers)
    asks = (headers[place.rank][0], headers[place.rank][1]) == chosen
    keys, counts = (request.keys, asked) if asks else (request.keys[:0], (0,) * place.workers)
    pulled = yield from table.exchange.pull(keys, counts, served, table.shard, table.ownership, place)
    return LookupRound(int(chosen[0]) - 1, pulled, asks, needs_gradient, columns[4])


def _refuse_out_of_step(wanted: list[int], steps: list[int]) -> None:
    if len(doing := sorted(set(wanted))) > 1:
        ranks = [[rank for rank, code in enumerate(wanted) if code == one] for one in doing]
        told = [f"ranks {who} {_DOING[what]}" for who, what in zip(ranks[:-1], doing[:-1], strict=True)]
        told.append(f"the others {_DOING[doing[-1]]}")
        remedy = "give every rank as many batches, or iterate over run.batches(loader)"
        if _CODES["asking"] in doing:
            remedy = "let every rank ask, not one alone (under `if rank == 0:`)"
        if _CODES["evaluated"] in doing:
            remedy = "every rank must call run.evaluate, not one alone (under `if rank == 0:`)"
        if _CODES["aside"] in doing:
            remedy = "every rank must make that call, not one alone (under `if rank == 0:`)"
        if _CODES["late"] in doing:
            remedy = (
                "let every rank's loss reach a parameter, by adding 0.0 * sum(p.sum() for p in model.parameters()) "
                "where it reaches none"
            )
        raise RuntimeError(f"look-up: {' while '.join(told)}; {remedy}")
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"look-up: ranks have taken different numbers of optimizer steps {steps} (rank order); if a GradScaler "
            "skips steps, pass it to parallelize or attach (scaler=scaler)"
        )
