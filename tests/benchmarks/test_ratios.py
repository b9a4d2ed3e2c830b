"""Statistics of the benchmark: medians, quartiles, and ratios that a drifting machine cannot move."""

import pytest
from benchmarks.measuring.ratios import Quartiles, over_best, over_each, over_fastest_of_rounds, quartiles
from benchmarks.measuring.record import Block, Record, load, save
from hypothesis import given
from hypothesis import strategies as st

SECONDS = st.floats(1e-3, 1e3)


def block(mode: str, round: int, *step_seconds: float) -> Block:
    return Block(
        mode=mode,
        round=round,
        step_seconds=step_seconds,
        wall_seconds=max(step_seconds),
        cpu_seconds=min(step_seconds),
        sent_bytes=(4e6, 1e6),
        received_bytes=(1e6, 4e6),
        peak_bytes=2**20,
        loss=1.0,
    )


def record(*blocks: Block) -> Record:
    return Record({"hosts": 2, "mbit_per_second": 100.0}, blocks)


def test_quartiles_are_those_found_by_hand():
    assert quartiles([5, 1, 4, 2, 3]) == Quartiles(2, 3, 4)
    assert quartiles([1, 2]) == Quartiles(1.25, 1.5, 1.75)
    assert quartiles([7]) == Quartiles(7, 7, 7)


@given(st.lists(SECONDS, min_size=1, max_size=30))
def test_a_quarter_of_the_numbers_lie_on_the_far_side_of_each_quartile(numbers):
    found = quartiles(numbers)
    assert found.first <= found.median <= found.third
    for below, share in ((found.first, 0.25), (found.median, 0.5), (found.third, 0.75)):
        under = sum(number < below for number in numbers)
        at_most = sum(number <= below for number in numbers)
        assert under <= share * (len(numbers) - 1) + 1 and at_most >= share * (len(numbers) - 1)


def test_no_numbers_have_no_quartiles():
    with pytest.raises(ValueError, match="no numbers"):
        quartiles([])


def test_the_best_rival_is_the_one_that_leaves_least_over_all_rounds():
    """The machine is half as fast in the last round; ratios are not."""
    ratios = over_each({"new": [1, 1, 2], "quick": [2, 2, 4], "lucky": [1, 3, 6]}, "new", ["lucky", "quick"])
    assert ratios == {"lucky": [1, 3, 3], "quick": [2, 2, 2]}
    assert over_best(ratios) == ("quick", [2, 2, 2])
    assert over_fastest_of_rounds(ratios) == [1, 2, 2]


def test_a_record_with_a_missing_or_a_double_turn_is_refused():
    with pytest.raises(ValueError, match=r"missing \[\('old', 1\)\]"):
        record(block("new", 0, 1), block("old", 0, 1), block("new", 1, 1))
    with pytest.raises(ValueError, match="once in every round"):
        record(block("new", 0, 1), block("new", 0, 1))


def test_a_record_comes_back_from_json_as_it_went(tmp_path):
    found = record(block("new", 0, 0.1, 0.25), block("old", 0, 1 / 3))
    save(found, tmp_path / "record.json")
    assert load(tmp_path / "record.json") == found
