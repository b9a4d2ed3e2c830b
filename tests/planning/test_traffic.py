"""Rows of a step from what was profiled: exact where it was measured, inside its bounds where it was not."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.planning.link_costs import busiest_share, merged_rows, staying_share, traffic, traffic_merged
from planning_cases import machines, model, row_facts


def test_what_was_measured_is_not_estimated():
    facts = row_facts(rows=1000, alpha=0.1, node=0.15, union=0.4, workers=8)
    profile = model(workers=8, per_node=2)
    assert [merged_rows(facts, profile, n) for n in (1, 2, 8)] == pytest.approx([100, 150, 400])


@given(workers=st.integers(1, 2000), alpha=st.floats(1e-6, 1), growth=st.floats(1, 4))
def test_merged_rows_lie_between_one_workers_and_all_workers_rows(workers, alpha, growth):
    facts = row_facts(rows=100_000, alpha=alpha, union=min(1.0, alpha * growth))
    merged = merged_rows(facts, model(), workers)
    one = alpha * 100_000
    assert one * (1 - 1e-9) <= merged <= min(100_000, workers * one) * (1 + 1e-9)


@given(exponent=st.floats(0, 1), workers=st.sampled_from([3, 16, 100]))
def test_rows_that_grow_by_a_power_are_foretold(exponent, workers):
    facts = row_facts(rows=1_000_000, alpha=1e-3, union=1e-3 * 4**exponent, workers=4)
    assert merged_rows(facts, model(), workers) == pytest.approx(1000 * workers**exponent)


@given(lookups=st.floats(1, 20), alpha=st.floats(1e-4, 1), repeats=st.floats(1, 50))
def test_rows_by_look_up_lie_between_merged_once_and_every_time_anew(lookups, alpha, repeats):
    merged = alpha * 10_000
    facts = row_facts(rows=10_000, alpha=alpha, lookups=lookups, ids=merged * repeats)
    moved = traffic(facts, model(), machines())
    assert merged * (1 - 1e-9) <= moved.distinct_rows <= max(1.0, lookups) * merged * (1 + 1e-9)
    if facts.ids > 1:
        assert moved.distinct_rows <= max(facts.ids, merged) * (1 + 1e-9)


def test_one_look_up_needs_no_estimate():
    facts = row_facts(lookups=1.0)
    assert traffic(facts, model(), machines()) == traffic_merged(facts, model(), machines())


def test_heaps_law_holds_within_a_fifth_for_zipf_ids():
    """Two look-ups of Zipf ids: the estimate against the count."""
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, 20_001, dtype=torch.float64)
    looks = [torch.multinomial(weights, 1000, replacement=True, generator=generator) for _ in range(2)]
    distinct = sum(len(torch.unique(ids)) for ids in looks)
    merged = len(torch.unique(torch.cat(looks)))
    facts = row_facts(rows=20_000, alpha=merged / 20_000, union=1.0, lookups=2.0, ids=2000)
    assert merged < distinct
    assert traffic(facts, model(), machines()).distinct_rows == pytest.approx(distinct, rel=0.2)


def test_look_ups_that_were_told_apart_need_no_law():
    facts = row_facts(rows=20_000, alpha=0.05, lookups=2.0, ids=2000)
    moved = traffic(replace(facts, asked_rows=1250.0), model(), machines())
    assert moved.distinct_rows == pytest.approx(1250) != traffic(facts, model(), machines()).distinct_rows
    assert moved.node_rows == pytest.approx(1.25 * traffic_merged(facts, model(), machines()).node_rows)
    with pytest.raises(ValueError, match=r"999\.0 rows asked for are fewer than the distinct"):
        replace(facts, asked_rows=999.0)


def test_the_busiest_of_fewer_owners_follows_from_the_loads_of_all():
    """row % 2 is the parity of row % 4; of hashed rows, neighbouring blocks join."""
    loads = {"load_modulo": (0.4, 0.1, 0.3, 0.2), "load_hashed": (0.4, 0.1, 0.3, 0.2)}
    facts = type(row_facts())(**{**row_facts().__dict__, **loads})
    assert [busiest_share(facts, owners, "modulo") for owners in (1, 2, 4)] == pytest.approx([1, 0.7, 0.4])
    assert [busiest_share(facts, owners, "hashed") for owners in (1, 2, 4)] == pytest.approx([1, 0.5, 0.4])
    assert busiest_share(facts, 3, "modulo") == busiest_share(facts, 3, "hashed") == 1 / 3


def test_the_modulo_shares_are_those_of_real_rows():
    rows = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:333] ** 2 % 997
    share = {p: (rows % p).bincount(minlength=p).double() / len(rows) for p in (2, 4)}
    facts = type(row_facts())(**{**row_facts().__dict__, "load_modulo": tuple(share[4].tolist())})
    assert busiest_share(facts, 2, "modulo") == pytest.approx(float(share[2].max()))


def test_rows_that_stay_put_are_those_that_did_not_repeat_where_that_was_seen():
    facts = replace(row_facts(), repeated=0.3)
    assert staying_share(facts, model(), 4) == pytest.approx(0.7)
    assert staying_share(facts, model(), 8) == staying_share(row_facts(), model(), 8)


@given(exponent=st.floats(0, 1), workers=st.sampled_from([2, 4, 16]))
def test_where_it_was_not_seen_a_batch_has_as_many_new_rows_as_those_of_one_more_worker(exponent, workers):
    facts = row_facts(rows=1_000_000, alpha=1e-3, union=1e-3 * 4**exponent, workers=4)
    staying = staying_share(facts, model(), workers)
    assert staying == pytest.approx((workers + 1) ** exponent - workers**exponent, abs=1e-9)
    if exponent in (0, 1):  # all batches alike, or none
        assert staying == pytest.approx(exponent)


@given(exponent=st.floats(0.01, 1), repeated=st.floats(0, 1))
def test_two_steps_leave_fewer_rows_where_they_are_as_those_of_twice_the_workers(exponent, repeated):
    facts = replace(row_facts(rows=1_000_000, alpha=1e-3, union=1e-3 * 4**exponent, workers=4), repeated=repeated)
    new = 9**exponent - 8**exponent, 5**exponent - 4**exponent
    assert staying_share(facts, model(), 4, steps=2) == pytest.approx((1 - repeated) * new[0] / new[1], abs=1e-6)


def test_a_table_that_no_batch_reads_has_nothing_to_send_early():
    assert staying_share(row_facts(alpha=0.0, union=0.0, ids=0.0), model(), 4) == 0.0
