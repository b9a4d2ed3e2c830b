"""The cyclic schedules keep the promises of the paper: one worker per stage, constant memory, causality."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.schedules.cyclic import cyclic, cyclic_pipeline

counts = st.integers(1, 7)
cost = st.fractions(Fraction(1, 8), 8, max_denominator=8)
costs = st.lists(st.tuples(cost, cost), min_size=1, max_size=6)


def steady(schedule):
    """One period of ticks with nothing left of the filling."""
    start = 3 * schedule.period
    return range(start, start + schedule.period)


@given(counts)
def test_with_as_many_stages_as_workers_each_stage_is_on_one_worker_at_every_tick(n):
    made = cyclic(n)
    for tick in steady(made):
        running = [
            action.stage for row in made.ticks for action in row if (tick - action.start) % made.period < action.ticks
        ]
        assert sorted(running) == list(range(n))


@given(counts)
def test_held_activations_are_constant_and_stage_j_is_held_by_n_minus_j(n):
    made = cyclic(n)
    for tick in steady(made):
        stages = [stage for _, _, stage in made.held(tick)]
        assert len(stages) == n * (n + 1) // 2
        assert [stages.count(stage) for stage in range(n)] == [n - stage for stage in range(n)]


@pytest.mark.parametrize(("n", "k"), [(2, 2), (2, 4), (2, 8), (4, 4), (4, 8), (4, 16), (8, 4), (8, 16), (6, 12)])
def test_finer_stages_hold_n_times_k_plus_one_halves(n, k):
    assert {len(cyclic(n, k).held(tick)) for tick in steady(cyclic(n, k))} == {n * (k + 1) // 2}


@given(counts, st.integers(0, 8))
def test_with_equal_stages_the_rule_is_the_papers(n, slack):
    want = tuple(tuple(int(i + j < n - 1 + slack) for j in range(n)) for i in range(n))
    assert cyclic(n, slack=slack).staleness == want


@given(counts, counts)
def test_with_k_unlike_n_the_rule_is_i_plus_one_over_n_plus_j_over_k(n, k):
    want = tuple(tuple(int((i + 1) * k + j * n < n * k) for j in range(k)) for i in range(n))
    assert cyclic(n, k).staleness == want


@given(counts, costs, st.integers(0, 8))
def test_weights_are_fresh_exactly_when_a_clock_says_they_exist(n, pairs, slack):
    """An independent simulation: worker i starts i T/N late; `slack` is so many T/N of notice."""
    whole = sum(f + b for f, b in pairs)
    made = cyclic(n, slack=slack, costs=pairs)
    step = 5
    for j in range(len(pairs)):
        backward_ends = []
        for i in range(n):
            clock = (step - 1) * whole + i * whole / n + sum(f for f, _ in pairs)
            for k in reversed(range(j, len(pairs))):
                clock += pairs[k][1]
            backward_ends.append(clock)
        for i in range(n):
            needed = step * whole + i * whole / n + sum(f for f, _ in pairs[:j])
            there = max(backward_ends) + slack * whole / n <= needed
            assert made.version((step, i, j)) == (step if there else step - 1)


@given(counts, costs)
def test_ticks_keep_the_order_of_real_time(n, pairs):
    whole = sum(f + b for f, b in pairs)
    made = cyclic(n, costs=pairs)
    pairs_of_time = set()
    for i, row in enumerate(made.ticks):
        clock = i * whole / n
        for action in row:
            pairs_of_time.add((action.start, clock))
            clock += pairs[action.stage][action.kind == "B"]
            pairs_of_time.add((action.end, clock))
    in_ticks = sorted(pairs_of_time)
    assert in_ticks == sorted(pairs_of_time, key=lambda both: both[1])
    assert len({tick for tick, _ in in_ticks}) == len({clock for _, clock in in_ticks}) == len(in_ticks)


@given(counts)
def test_half_of_the_pairs_are_stale_at_slack_0_and_all_at_slack_n(n):
    assert cyclic(n).stale_share == (n - 1) / (2 * n)
    assert cyclic(n, slack=n).stale_share == 1


@given(counts, counts, st.integers(0, 3))
def test_the_pipeline_reads_the_newest_weights_that_exist(k, extra, slack):
    m = max(1, k - 2 + extra)
    made = cyclic_pipeline(k, m)
    assert made.staleness == tuple(tuple(max(0, ceil((k - 1 - j - i) / m)) for j in range(k)) for i in range(m))
    step = 5
    for j in range(k):
        last_backward = 2 * (step * m - 1) + 2 * k - 1 - j
        for i in range(m):
            assert made.version((step, i, j)) == step - (2 * (step * m + i) + j <= last_backward)


@given(counts)
def test_with_as_many_micro_batches_as_stages_ring_and_pipeline_read_the_same_versions(n):
    for slack in range(n + 1):
        assert cyclic(n, slack=slack).staleness == cyclic_pipeline(n, n, slack).staleness


@given(st.integers(2, 7), counts)
def test_slack_m_is_the_rule_of_pipedream_2bw(k, extra):
    m = k - 2 + extra
    assert cyclic_pipeline(k, m, slack=m).stale_share == 1


@given(st.integers(2, 7))
def test_stage_j_of_the_pipeline_keeps_k_minus_j_micro_batches_at_most(k):
    made = cyclic_pipeline(k, k)
    for stage in range(k):
        assert max(sum(place[2] == stage for place in made.held(tick)) for tick in steady(made)) == k - stage


@pytest.mark.parametrize("k", [3, 4, 6])
def test_a_pipeline_with_too_few_micro_batches_is_refused(k):
    with pytest.raises(ValueError, match=f"{k} stages want at least {k - 1} micro-batches"):
        cyclic_pipeline(k, k - 2)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": 2, "slack": -1},
        {"workers": 2, "stages": 3, "costs": [[1, 1]]},
        {"workers": 2, "costs": [[1, 0]]},
    ],
)
def test_costs_and_counts_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match="cyclic: want workers >= 1"):
        cyclic(**options)
