"""Parallax's table of transfers (Kim et al., EuroSys 2019): bytes a machine sends and receives, one worker a machine.

w: bytes of a variable; m: equal variables, evenly placed. Ids and headers, which the paper leaves out, are added here.
"""

import pytest

from armillary.exchanges import build_dense, build_row
from armillary.exchanges.gather_rows import COUNT_BYTES
from armillary.exchanges.look_up import HEADER_BYTES
from armillary.exchanges.owned_rows import ID_BYTES
from armillary.planning.link_costs import traffic, traffic_merged
from armillary.planning.pricing import Case, dense_forecast, row_forecast
from armillary.plans import Choice, layout_of
from planning_cases import LINKS_ONLY, dense, machines, model, row_facts, table

WORKERS = [2, 3, 8, 48]
W = 1_000_000
FACTS = [dense("w", W // 4 - 1)]  # and a flag of use
ONE = layout_of(FACTS)
ALPHA = 0.02


def facts(workers):
    return row_facts(rows=50_000, width=256, alpha=ALPHA, workers=workers)


def w_and_ids(rows):
    """The bytes of the whole table, and what they grow to when an id goes with every row."""
    w = rows.rows * rows.row_bytes
    return w, w * (1 + ID_BYTES / rows.row_bytes)


@pytest.mark.parametrize("n", WORKERS)
def test_dense_by_all_reduce(n):
    sent = build_dense("all_reduce").sent_bytes(ONE, machines(n))
    assert [2 * one for one in sent] == pytest.approx([4 * W * (n - 1) / n] * n)  # a ring receives what it sends


@pytest.mark.parametrize("n", WORKERS)
def test_dense_by_server_one_variable_is_a_hot_spot(n):
    sent = build_dense("owned_dense").sent_bytes(ONE, machines(n))
    received = [sum(sent[1:]), *[sent[0] / (n - 1)] * (n - 1)]  # all clients send to the server, it to all alike
    assert sent[0] + received[0] == 2 * W * (n - 1)
    assert [one + other for one, other in zip(sent[1:], received[1:], strict=True)] == [2 * W] * (n - 1)


@pytest.mark.parametrize("n", WORKERS)
def test_dense_by_server_many_variables_cost_as_much_as_all_reduce(n):
    m = 3 * n
    sent = [build_dense("owned_dense", owner=variable).sent_bytes(ONE, machines(n)) for variable in range(m)]
    per_machine = [sum(column) for column in zip(*sent, strict=True)]
    assert [2 * one for one in per_machine] == pytest.approx([4 * W * m * (n - 1) / n] * n)


@pytest.mark.parametrize("n", WORKERS)
def test_sparse_by_servers_evenly_placed(n):
    rows = facts(n)
    sent = build_row("owned_rows").sent_bytes(traffic(rows, model(workers=n), machines(n)), machines(n))
    w, _ = w_and_ids(rows)
    ids = 2 * ALPHA * w * (n - 1) / n * ID_BYTES / rows.row_bytes
    assert 2 * sent == pytest.approx(4 * ALPHA * w * (n - 1) / n + ids)


@pytest.mark.parametrize("n", WORKERS)
def test_sparse_by_gather(n):
    rows = facts(n)
    sent = build_row("gather_rows").sent_bytes(traffic_merged(rows, model(workers=n), machines(n)), machines(n))
    _, with_ids = w_and_ids(rows)
    assert 2 * sent == pytest.approx(2 * ALPHA * with_ids * (n - 1) + 2 * COUNT_BYTES * (n - 1))


@pytest.mark.parametrize("n", WORKERS)
def test_sparse_on_one_server_its_link_carries_everything(n):
    rows, links = facts(n), machines(n, latency=0.0)
    case = Case(model(workers=n), links, LINKS_ONLY)
    forecast = row_forecast(table(facts=rows), Choice("owned_rows", {"owners": 1}), "exact", case)
    w, with_ids = w_and_ids(rows)
    # It sends rows, and receives ids and gradients: the phases follow each other.
    want = ALPHA * w * (n - 1) + ALPHA * with_ids * (n - 1) + HEADER_BYTES * (n - 1)
    assert forecast.seconds * links.link.bytes_per_second == pytest.approx(want)


@pytest.mark.parametrize("n", WORKERS)
def test_dense_on_one_server_its_link_carries_everything(n):
    links = machines(n, latency=0.0)
    forecast = dense_forecast(FACTS, Choice("owned_dense"), Case(model(workers=n), links, LINKS_ONLY))
    assert forecast.seconds * links.link.bytes_per_second == pytest.approx(2 * W * (n - 1))
    assert forecast.sent_bytes == pytest.approx(2 * W * (n - 1) / n)  # the mean machine sends no more than in a ring


@pytest.mark.parametrize("n", WORKERS)
def test_gather_moves_half_the_number_of_workers_times_what_owners_move(n):
    rows = facts(n)
    gathered = build_row("gather_rows").sent_bytes(traffic_merged(rows, model(workers=n), machines(n)), machines(n))
    owned = build_row("owned_rows").sent_bytes(traffic(rows, model(workers=n), machines(n)), machines(n))
    assert gathered / owned == pytest.approx(n / 2, rel=0.01)  # ids weigh differently: 4 bytes beside 1 kB
