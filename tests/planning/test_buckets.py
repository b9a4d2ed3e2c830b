"""Buckets keep the order in which gradients arrive, hold one dtype, and reach their limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.planning.candidates import BucketLimits, arrival_of, buckets, default_limits
from planning_cases import dense

FACTS = st.lists(
    st.tuples(st.integers(1, 600), st.sampled_from(["float32", "bfloat16"]), st.booleans()), min_size=1, max_size=25
).flatmap(
    lambda drawn: st.permutations(range(len(drawn))).map(
        lambda order: [
            dense(f"p{i}", n, order[i] if seen else None, "dense" if seen else "never", dtype)
            for i, (n, dtype, seen) in enumerate(drawn)
        ]
    )
)
LIMITS = st.builds(BucketLimits, st.integers(1, 3000), st.integers(1, 3000))


@given(facts=FACTS, limits=LIMITS)
def test_every_parameter_is_in_one_bucket(facts, limits):
    placed = [fact.name for bucket in buckets(facts, limits) for fact in bucket]
    assert sorted(placed) == sorted(fact.name for fact in facts)


@given(facts=FACTS, limits=LIMITS)
def test_a_bucket_holds_one_dtype_and_is_complete_when_its_place_comes(facts, limits):
    made = buckets(facts, limits)
    assert all(len({fact.dtype for fact in bucket}) == 1 for bucket in made)
    assert all(len({fact.arrival is None for fact in bucket}) == 1 for bucket in made)
    complete = [max(map(arrival_of, bucket)) for bucket in made]
    assert complete == sorted(complete)


@given(facts=FACTS, limits=LIMITS)
def test_buckets_reach_their_limit_and_no_parameter_is_added_after(facts, limits):
    by_kind = {}
    for bucket in buckets(facts, limits):
        by_kind.setdefault((bucket[0].dtype, bucket[0].arrival is None), []).append(bucket)
    for made in by_kind.values():
        for place, bucket in enumerate(made):
            limit = limits.bytes if place else limits.first_bytes
            assert sum(fact.bytes for fact in bucket[:-1]) < limit
            assert place == len(made) - 1 or sum(fact.bytes for fact in bucket) >= limit


def test_parameters_without_a_gradient_never_hold_up_others():
    facts = [dense("a", arrival=1), dense("lost", arrival=None, reads="never"), dense("b", arrival=0)]
    assert [[fact.name for fact in bucket] for bucket in buckets(facts, BucketLimits(10**6, 10**6))] == [
        ["b", "a"],
        ["lost"],
    ]


def test_gloo_wants_small_buckets_and_nccl_large_ones_after_a_small_first():
    assert default_limits("gloo").bytes == default_limits("gloo").first_bytes == 2 << 20
    assert default_limits("nccl") == (1 << 20, 25 << 20)


def test_a_bucket_of_no_bytes_is_refused():
    with pytest.raises(ValueError, match="at least 1 byte"):
        buckets([dense()], BucketLimits(0, 1))
