"""A forecast against what happened: bytes counted in lockstep, memory by hand, seconds of hand-made links."""

from dataclasses import replace

import pytest
import torch

from armillary.exchanges import RankInfo, build_row
from armillary.exchanges.look_up import LookupRequest, LookupTable, look_up
from armillary.planning.link_costs import Upkeep
from armillary.planning.planner import plan
from armillary.planning.pricing import (
    ADAM,
    SGD,
    Case,
    dense_forecast,
    dense_update_seconds,
    idle_round,
    row_forecast,
)
from armillary.plans import Choice, Forecast, Link, Processor, RowRate, UpdateRate
from armillary.profiler.access_patterns import Lookups
from armillary.profiler.access_patterns import row_facts as count_rows
from armillary.reference import lockstep
from planning_cases import LINKS_ONLY, dense, machines, model, row_facts, table

ROWS, WIDTH, ASKED = 9973, 8, 4000
KILOBYTE = [dense("w", 249)]  # and a flag of use


def one_step(exchange, whole, ids, place):
    """One rank: a look-up, the idle round, the push."""
    owned = exchange.ownership(ROWS, place)
    keys = torch.unique(owned.keys(ids))
    if exchange.placement == "replicated":
        none = (0,) * place.workers
        pulled = yield from exchange.pull(keys, none, none, whole, owned, place)
    else:
        shard = whole[owned.ids(place.rank)] if place.rank in owned.owners else whole[:0]
        held = LookupTable("table", exchange, owned, shard)
        pulled = (yield from look_up(LookupRequest(0, keys, True, 0), [held], place)).pulled
        yield from look_up(LookupRequest("idle", keys[:0], False, 0), [held], place)
    yield from exchange.push([torch.ones(len(keys), WIDTH)], [pulled.route], owned, place)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (3, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize(
    "choice",
    [Choice("gather_rows"), Choice("owned_rows"), Choice("owned_rows", {"owners": 1}),
     Choice("owned_rows", {"order": "hashed"}), Choice("owned_rows_by_node")],
    ids=str,
)  # fmt: skip
def test_predicted_bytes_are_those_counted(choice, nodes, per_node):
    workers = nodes * per_node
    generator = torch.Generator().manual_seed(workers)
    batches = [torch.randperm(ROWS, generator=generator)[:ASKED] for _ in range(workers)]
    looked = [Lookups(1, ids.sort().values, torch.ones_like(ids), len(ids)) for ids in batches]
    counted = count_rows(ROWS, WIDTH * 4, looked, workers, per_node)
    topology, profile = machines(nodes, per_node), model(table(facts=counted), workers=workers, per_node=per_node)
    exchange = build_row(choice.name, **choice.options)
    programs = [
        one_step(exchange, torch.ones(ROWS, WIDTH), ids, RankInfo(rank, workers, per_node))
        for rank, ids in enumerate(batches)
    ]
    _, sent = lockstep.run(programs, per_node)
    forecast = row_forecast(table(facts=counted), choice, False, Case(profile, topology))
    if exchange.placement == "row_sharded":
        forecast = forecast + idle_round(topology)
    # A worker's share of its own rows is 1 / N in the mean over draws; this is one draw.
    assert forecast.sent_bytes == pytest.approx(sum(sent) / workers, rel=0.01)
    if exchange.placement == "replicated" or choice.options == {"owners": 1}:  # there no draw decides
        assert forecast.sent_bytes == pytest.approx(sum(sent) / workers, rel=1e-12)


def test_the_bytes_of_a_bucket_are_those_of_its_tensor():
    """Gradients, and one used flag a parameter; weights are no part of it."""
    profile = model(dense("a", 1000, 0), dense("b", 24, 1))
    for mean in ("workers", "weights"):
        (group,) = plan(profile, machines(4), mean=mean).groups
        assert group.forecast.sent_bytes == 2 * 3 / 4 * 4 * (1024 + 2)


@pytest.mark.parametrize(("slots", "moves", "is_lazy", "copies", "windows"), [
    (0, False, False, 1, 2),
    (1, False, False, 2, 3),
    (1, True, False, 3, 0),
    (2, True, False, 4, 0),
    (2, True, True, 3, 4),
])  # fmt: skip
@pytest.mark.parametrize(("choice", "owners"), [("owned_rows", 4), ("gather_rows", 1)])
def test_memory_is_weight_gradient_and_state_of_the_rows_held(slots, moves, is_lazy, copies, windows, choice, owners):
    """Exact Adam 4 T / N; lazy 3 T / N and the touched rows once more, four times (weight, gradient, moments)."""
    rows = row_facts(rows=1000, width=16, alpha=0.1, union=0.25)
    assumptions = type(ADAM)(optimizer_slots=slots, moves_quiet_rows=moves)
    forecast = row_forecast(table(facts=rows), Choice(choice), is_lazy, Case(model(), machines(4), assumptions))
    held = 64_000 / owners
    assert forecast.memory_bytes == copies * held + windows * 0.25 * held


def test_the_busiest_owner_is_what_counts():
    even = row_facts(workers=4)
    skewed = type(even)(**{**even.__dict__, "load_modulo": (0.7, 0.1, 0.1, 0.1)})
    links = machines(4, latency=0.0)
    case = Case(model(), links, LINKS_ONLY)
    choice = Choice("owned_rows")
    one, other = (row_forecast(table(facts=facts), choice, False, case) for facts in (even, skewed))
    assert one.sent_bytes == other.sent_bytes
    assert other.seconds == pytest.approx(2.8 * one.seconds, rel=1e-3)


def test_fewer_owners_have_busier_links_and_the_same_bytes():
    case = Case(model(workers=8), machines(8), LINKS_ONLY)
    forecasts = [row_forecast(table(workers=8), Choice("owned_rows", {"owners": p}), False, case) for p in (1, 2, 4, 8)]
    assert len({forecast.sent_bytes for forecast in forecasts}) == 1
    seconds = [forecast.seconds for forecast in forecasts]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == 4


def test_merging_inside_nodes_pays_where_the_node_is_fast_and_shares_its_rows():
    rows = row_facts(alpha=0.05, node=0.06, union=0.1, workers=16)

    def seconds(name, inside):
        case = Case(model(workers=16, per_node=8), machines(2, 8, inside=Link(0, inside), latency=0.0), LINKS_ONLY)
        return row_forecast(table(facts=rows), Choice(name), False, case).seconds

    assert seconds("owned_rows_by_node", 1e11) < seconds("owned_rows", 1e11)
    assert seconds("owned_rows_by_node", 1e7) > seconds("owned_rows", 1e7)


def test_what_stays_in_the_node_leaves_by_the_inner_link_meanwhile():
    """3 of a rank's 7 peers are in its node: the outer link carries 4 sevenths, and it decides as it is the slower."""
    outer, inner = 1e6, 1e9
    topology = machines(2, 4, megabits=outer * 8 / 1e6, latency=0.0, inside=Link(0.0, inner))
    case = Case(model(workers=8, per_node=4), topology, LINKS_ONLY)
    forecast = row_forecast(table(workers=8), Choice("owned_rows"), False, case)
    assert forecast.seconds == pytest.approx(forecast.sent_bytes * 4 / 7 / outer)
    turned = Case(
        case.profile, machines(2, 4, megabits=8 * inner / 1e6, latency=0.0, inside=Link(0.0, outer)), LINKS_ONLY
    )
    forecast = row_forecast(table(workers=8), Choice("owned_rows"), False, turned)
    assert forecast.seconds == pytest.approx(forecast.sent_bytes * 3 / 7 / outer)


def test_an_optimizer_that_moves_quiet_rows_passes_over_all_that_an_owner_holds():
    """Fill the gradient; read it; read and write weight and two moments: 8 times the share, at 1 B/s; lazily none."""
    assumptions = type(ADAM)(row_seconds=0.0, memory_bytes_per_second=1.0)
    case = Case(model(), machines(4, megabits=1e9, latency=0.0), assumptions)
    exact, lazy = (row_forecast(table(rows=1000, width=16), Choice("owned_rows"), u, case) for u in (False, True))
    assert exact.seconds == pytest.approx(8 * 64_000 / 4)
    assert lazy.seconds == pytest.approx(0, abs=1e-3)


def test_index_work_is_paid_for_rows_asked_and_rows_served():
    """Each worker asks for 10 rows; of 4 owners each serves 10, a single one 40."""
    assumptions = type(SGD)(0, False, row_seconds=1.0, memory_bytes_per_second=1e300)
    case = Case(model(), machines(4, megabits=1e12, latency=0.0), assumptions)
    rows = table(rows=1000, width=1, alpha=0.01)
    seconds = [row_forecast(rows, Choice("owned_rows", {"owners": p}), False, case).seconds for p in (4, 1)]
    assert seconds == pytest.approx([20, 50])
    assert row_forecast(rows, Choice("gather_rows"), False, case).seconds == pytest.approx(40)


def test_the_round_that_ends_look_ups_is_counted_once_a_step():
    profile = model(table("t", 0, alpha=0.001), table("u", 1, alpha=0.001))
    topology = machines(4, megabits=100)
    made = plan(profile, topology, constraints={"*": "owned_rows"})
    alone = [row_forecast(fact, Choice("owned_rows"), False, Case(profile, topology)) for fact in profile.parameters]
    crossing = Forecast(peak_bytes=made.forecast.peak_bytes)
    assert made.forecast == alone[0] + idle_round(topology) + alone[1] + crossing


def test_one_worker_pays_for_no_link():
    case = Case(model(table(workers=1), workers=1), machines(1), LINKS_ONLY)
    assert dense_forecast(KILOBYTE, Choice("all_reduce"), case).seconds == pytest.approx(0, abs=1e-12)
    for name in ("gather_rows", "owned_rows"):
        forecast = row_forecast(table(workers=1), Choice(name), False, case)
        assert (forecast.seconds, forecast.sent_bytes) == (pytest.approx(0, abs=1e-12), 0)
    assert idle_round(machines(1)).seconds == 0


def test_a_ring_of_n_pays_two_latencies_a_hop():
    links = machines(5, latency=0.5)
    seconds = dense_forecast(KILOBYTE, Choice("all_reduce"), Case(model(workers=5), links, LINKS_ONLY)).seconds
    assert seconds == pytest.approx(2 * 4 * 0.5 + 2 * 4 / 5 * 1000 / links.between.bytes_per_second)


def test_no_owners_named_means_all_workers():
    case = Case(model(workers=6), machines(6))
    every, named = (
        row_forecast(table(), Choice("owned_rows", options), False, case) for options in ({}, {"owners": 6})
    )
    assert every == named == row_forecast(table(), Choice("owned_rows", {"owners": 0}), False, case)


def test_a_node_of_one_pays_nothing_for_merging_inside_it():
    topology = machines(4, latency=1.0)
    choice = Choice("owned_dense", {"local_aggregation": True})
    seconds = dense_forecast(KILOBYTE, choice, Case(model(), topology, LINKS_ONLY)).seconds
    assert seconds == pytest.approx(topology.between.seconds(2 * 3 * 1000, 2))


def test_assumptions_refuse_nonsense():
    with pytest.raises(ValueError, match="want optimizer_slots, row_seconds and step_slots >= 0"):
        type(SGD)(optimizer_slots=-1)
    with pytest.raises(ValueError, match="memory_bytes_per_second > 0"):
        type(SGD)(memory_bytes_per_second=0)


def test_a_table_that_is_exchanged_whole_pays_for_filling_its_gradient():
    """Stages are timed without; twice its bytes, as the kernel fills new memory, too."""
    case = Case(model(table("t")), machines(), SGD)
    fact = case.profile.parameter("t")
    beside = dense("d", 10)
    plain, filled = (
        dense_forecast([one, beside], Choice("all_reduce"), case) for one in (dense("t", fact.elements), fact)
    )
    assert filled.seconds - plain.seconds == pytest.approx(2 * fact.bytes / SGD.memory_bytes_per_second)
    assert (filled.sent_bytes, filled.memory_bytes) == (plain.sent_bytes, plain.memory_bytes)


IDLE = RowRate(0.0, 0.0, 0.0)
BY_STATE = Processor(
    IDLE, IDLE, IDLE, 1e300, updates=(UpdateRate(1.0, 2.0), UpdateRate(5.0, 7.0), UpdateRate(30.0, 90.0))
)


@pytest.mark.parametrize(
    ("processor", "sgd", "adam"), [(None, 3 * 40, 7 * 120), (BY_STATE, 1 + 2 * 40, 2 * 30 + 90 * 120)]
)
def test_of_a_bucket_each_parameter_is_updated_and_kept_by_its_own_optimizer(processor, sgd, adam):
    """Seconds of the update alone, at 1 B/s; then bytes: weight and gradient of all, two moments of Adam's."""
    facts = [dense("a", 10), dense("b", 20), dense("c", 10)]
    own, others = Upkeep(0, False), replace(ADAM, memory_bytes_per_second=1.0)
    case = Case(model(*facts), replace(machines(1), processor=processor), replace(others, own={"a": own}))
    assert dense_update_seconds(160, facts, case) == pytest.approx(sgd + adam)
    held = dense_forecast(facts, Choice("all_reduce"), case).memory_bytes
    assert held == pytest.approx(2 * 160 + 2 * 120, rel=0.1)
