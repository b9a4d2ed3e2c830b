"""Row-sparse gradients by the workers that own the rows: rows are pulled before forward, gradients pushed after
backward.

Each rank sends the ids it reads (each once) to their owners, which answer with the rows; the push sends gradients the
same way back, so it needs no ids and no counts (those of the pull ride on the look-up's header, `look_up.py`).
Duplicates are merged before anything is sent (Parallax's local aggregation inside a worker). Per rank and step, with
u distinct rows of b bytes, of which the share a lives elsewhere: u a (2 b + 4) bytes.

Rows, and their gradients, may be coded on the way (`rows_as`, `gradients_as`), row by row, those that stay here too: so
what is read does not hang on who owns it. What a code leaves out is lost; the owner's row is as it was.

Source: Parallax (EuroSys 2019), sections 3-4, with servers turned into the workers themselves.
Departures: all-to-all instead of server processes; sparse and dense gradients are both averaged (Parallax sums sparse
ones by default). Codes: TorchRec's quantized communications.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.codecs.rows import RowCodes, row_code
from armillary.exchanges.dense import EarlyLegs, Leg, Legs
from armillary.exchanges.exchange import Counts, Pulled, RowExchange, RowTraffic, Staying, row_exchange
from armillary.exchanges.ownership import Ownership, orders, owners_among
from armillary.plans.advice import Advice, Combination, Situation, advises, not_for, parallelized, planned
from armillary.plans.parcel import RankInfo
from armillary.plans.profile import ParameterFact
from armillary.plans.registry import Choice
from armillary.plans.requests import AllToAll, Program
from armillary.plans.topology import Topology

__all__ = ["by_rank", "merge_rows", "owned_rows"]

ID_BYTES = 4
MASK_BYTES = 1  # per row asked for: whether it stays put


class OwnerRoute(NamedTuple):
    """One look-up as both sides remember it: how many rows this rank asked of each, and which it served to each."""

    asked: tuple[int, ...]
    served: tuple[int, ...]
    served_rows: Tensor  # (sum(served),) local rows of this rank's shard, in rank order of the askers


def _offers(fact: ParameterFact, topology: Topology) -> list[dict[str, Any]]:
    """All workers as owners, dealt out in either order; then fewer owners: 1, 2, 4, ... below their number."""
    assert fact.rows is not None, fact
    dealt = [{} if order == "modulo" else {"order": order} for order in orders(fact.rows)]
    return dealt + [{"owners": 1 << power} for power in range((topology.workers - 1).bit_length())]


@row_exchange(
    {}, {"order": "hashed"}, {"owners": 1}, {"owners": 2},
    {"rows_as": "lower_precision", "gradients_as": Choice("quantize", {"bits": 4})},
    offers=_offers, owner_option="owners", coded_by=("rows_as", "gradients_as"),
)  # fmt: skip
def owned_rows(
    owners: int = 0,
    order: str = "modulo",
    rows_as: Choice | str | None = None,
    gradients_as: Choice | str | None = None,
) -> RowExchange:
    """
    Args:
        owners: over how many workers the table is split (Parallax's number of partitions); 0 means all of them.
        order: how rows are dealt, "modulo" or "hashed" (see `Ownership`).
        rows_as, gradients_as: codecs of rows that are read, and of gradients that go back (NOT exact).

    Raises:
        ValueError: no such codec, or none that a row can be written by alone; owners that are no number.
    """
    if isinstance(owners, bool) or not isinstance(owners, int) or owners < 0:
        raise ValueError(f"exchange: owned_rows wants owners as a number of workers, or 0 for all, got {owners!r}")
    codes = RowCodes(row_code("rows_as", rows_as), row_code("gradients_as", gradients_as))

    def ownership(rows: int, place: RankInfo) -> Ownership:
        count = min(owners or place.workers, place.workers)
        ranks = owners_among(count, place.workers, place.workers_per_node)
        return Ownership(rows, ranks, place.workers, order)  # type: ignore[arg-type]

    def pull(
        keys: Tensor, asked: Counts, served: Counts, shard: Tensor, owned: Ownership, place: RankInfo
    ) -> Program[Pulled]:
        local = (keys % owned.capacity if len(owned.owners) > 1 else keys).to(torch.int32)
        wanted = (yield AllToAll(local, asked, served)).long()
        coded = yield AllToAll(codes.rows.encode(shard.index_select(0, wanted)), served, asked)
        return Pulled(codes.rows.decode(coded, shard), OwnerRoute(asked, served, wanted))

    def pull_early(
        keys: Tensor, asked: Counts, served: Counts, shard: Tensor, owned: Ownership, place: RankInfo,
        stay: Staying,
    ) -> Program[Pulled]:  # fmt: skip
        local = (keys % owned.capacity if len(owned.owners) > 1 else keys).to(torch.int32)
        wanted = (yield AllToAll(local, asked, served)).long()
        staying = stay.which(wanted)
        coming = (yield AllToAll(staying.to(torch.uint8), served, asked)).bool()
        early_served, early_asked = _chosen(staying, served), _chosen(coming, asked)
        early = yield AllToAll(codes.rows.encode(shard.index_select(0, wanted[staying])), early_served, early_asked)
        if stay.is_void():
            staying, coming, early = torch.zeros_like(staying), torch.zeros_like(coming), early[:0]
            early_served = early_asked = (0,) * len(asked)
        late = yield AllToAll(
            codes.rows.encode(shard.index_select(0, wanted[~staying])),
            _less(served, early_served), _less(asked, early_asked),
        )  # fmt: skip
        coded = late.new_empty((len(coming), *late.shape[1:]))
        coded[coming], coded[~coming] = early, late
        return Pulled(codes.rows.decode(coded, shard), OwnerRoute(asked, served, wanted))

    def push(
        gradients: Sequence[Tensor], routes: Sequence[Any], owned: Ownership, place: RankInfo
    ) -> Program[tuple[Tensor, Tensor]]:
        payload, send = by_rank([route.asked for route in routes], gradients)
        receive = tuple(sum(sizes) for sizes in zip(*(route.served for route in routes), strict=True))
        arrived = codes.gradients.decode((yield AllToAll(codes.gradients.encode(payload), send, receive)), payload)
        rows, _ = by_rank([route.served for route in routes], [route.served_rows for route in routes])
        return merge_rows(rows, arrived)

    def row_bytes(traffic: RowTraffic) -> tuple[int, int]:
        of_row = traffic.row_bytes, traffic.item_bytes
        return codes.rows.code_bytes(*of_row), codes.gradients.code_bytes(*of_row)

    def legs(traffic: RowTraffic, skew: float, topology: Topology) -> Legs:
        rows, (there, back) = traffic.distinct_rows * traffic.away * skew, row_bytes(traffic)
        pull = Leg("everyone", rows * (there + ID_BYTES), 2 * traffic.lookups)
        return Legs((pull,), (Leg("everyone", rows * back, 1),))

    def early_legs(traffic: RowTraffic, skew: float, staying: float) -> EarlyLegs:
        rows, (there, _) = traffic.distinct_rows * traffic.away * skew, row_bytes(traffic)
        bytes_of = (ID_BYTES, MASK_BYTES, staying * there, (1 - staying) * there)
        return EarlyLegs(*(Leg("everyone", rows * of_a_row, traffic.lookups) for of_a_row in bytes_of))

    told = partial(_mechanisms, codes)
    return RowExchange("row_sharded", ownership, pull, push, 1, legs, 2, pull_early, early_legs, _part, codes, told)


def _mechanisms(codes: RowCodes, pulled: int, pushed: int) -> dict[str, int]:
    how = [", coded" * (code.codec is not None) for code in codes]
    return {f"rows looked up{how[0]}": pulled, f"rows with gradients{how[1]}": pushed}


def _part(route: OwnerRoute, said: Tensor, heard: Tensor) -> tuple[OwnerRoute, OwnerRoute]:
    asked, served = _chosen(heard, route.asked), _chosen(said, route.served)
    others = OwnerRoute(_less(route.asked, asked), _less(route.served, served), route.served_rows[~said])
    return others, OwnerRoute(asked, served, route.served_rows[said])


def _chosen(mask: Tensor, counts: Counts) -> Counts:
    """How many are chosen in each rank's piece; as many tensor operations however many ranks there are."""
    ends = torch.tensor([0, *accumulate(counts)], device=mask.device)
    chosen = torch.cat([ends[:1], mask.cumsum(0)]).index_select(0, ends).tolist()
    return tuple(after - before for before, after in pairwise(chosen))


def _less(counts: Counts, others: Counts) -> Counts:
    return tuple(count - other for count, other in zip(counts, others, strict=True))


def merge_rows(rows: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Adds up the gradients of equal rows, in the order given: (n,), (n, *row) -> sorted distinct rows, their sums."""
    distinct, inverse = torch.unique(rows, return_inverse=True)
    sums = gradients.new_zeros(len(distinct), *gradients.shape[1:])
    return distinct, sums.index_add_(0, inverse, gradients)


def by_rank(sizes: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[int, ...]]:
    """Several tensors, each cut into one piece per rank, joined so that all pieces of a rank stand together."""
    if len(tensors) == 1:
        return tensors[0], tuple(sizes[0])
    pieces = [tensor.split_with_sizes(list(cut)) for tensor, cut in zip(tensors, sizes, strict=True)]
    ranks = range(len(sizes[0]))
    joined = torch.cat([piece[rank] for rank in ranks for piece in pieces])
    return joined, tuple(sum(cut[rank] for cut in sizes) for rank in ranks)


@advises("Parallax", "tables by row with their owners, the rest by all-reduce", "methods/hybrid.md")
def _advice(situation: Situation) -> Advice:
    tables = [fact for fact in situation.profile.parameters if fact.requires_grad and fact.shardable]
    if not tables:
        return not_for("no table is read by row")
    share = sum(fact.alpha * fact.bytes for fact in tables) / sum(fact.bytes for fact in tables)
    found = planned(
        situation, f"a rank reads {share:.2g} of {len(tables)} tables in a step", "--rule parallax", rule="parallax"
    )
    if not found.applies:
        return found
    return replace(found, combinations=_combined(situation))


def _combined(situation: Situation) -> tuple[Combination, ...]:
    """Look-ups of the next batch leave early; and rows in code, beside everything else in code."""
    found = []
    ahead = situation.price(prefetch=True)
    if ahead.plan.looks_ahead:
        loop = "for batch in run.batches(batches):", "    loss(model, batch).backward(), optimizer.step()"
        shell, python = situation.train("--autotune 4"), parallelized(*loop, prefetch=True)
        found.append(Combination("tables by row + prefetch", ahead.forecast, shell=shell, python=python))
    by_row = [group for group in situation.chosen.plan.groups if group.exchange and group.exchange.name == "owned_rows"]
    if not by_row:
        return tuple(found)
    coded = {"rows_as": Choice("lower_precision"), "gradients_as": Choice("lower_precision")}
    ways = {group.parameters[0]: Choice("owned_rows", {**group.own_exchange.options, **coded}) for group in by_row}
    try:
        both = situation.price(constraints={"*": Choice("lower_precision"), **ways})
    except ValueError:  # nothing but tables, or one that cannot be coded
        return tuple(found)
    asked = {"*": "bf16", **{name: str(way) for name, way in ways.items()}}
    shell = situation.train(" ".join(f"--exchange '{way}={name}'" for name, way in asked.items()))
    name, python = "tables by row + bfloat16", parallelized(constraints=asked)
    return (*found, Combination(name, both.forecast, both.plan.departures, shell, python))
