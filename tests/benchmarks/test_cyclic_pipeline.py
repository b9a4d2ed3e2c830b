"""Rounds of several records of the pipelines are read as those of one, and none is left out."""

import pytest
from benchmarks.cyclic_pipeline.run import flushes, pooled, seconds, table


def record(rounds, cyclic_seconds, difference=0.0, **conditions):
    def blocks(step_seconds):
        return [{"step_seconds": step_seconds, "cpu_seconds": 1.0, "whole_seconds": 1.0}] * rounds

    return {
        "conditions": {"machine": "one", "micro-batches": 2, "samples a micro-batch": 64, "rounds": rounds}
        | conditions,
        "blocks": {"a flush": blocks(3.0), "cyclic": blocks(cyclic_seconds)},
        "largest_weight_difference": {"a flush": 0.0, "cyclic": difference},
    }


def test_every_round_of_every_record_is_in_the_pool_in_order():
    parts = [record(2, 2.0, difference=1e-9), record(1, 1.5), record(3, 2.5, difference=1e-8)]
    whole = pooled(parts)
    assert seconds(whole) == {"a flush": [3.0] * 6, "cyclic": [2.0, 2.0, 1.5, 2.5, 2.5, 2.5]}
    assert whole["conditions"]["rounds"] == "2 + 1 + 3" and whole["conditions"]["machine"] == "one"
    assert whole["largest_weight_difference"] == {"a flush": 0.0, "cyclic": 1e-8}
    assert flushes(whole) == ["a flush"]
    assert "rounds 2 + 1 + 3." in table(whole)[0]
    assert [len(part["blocks"]["cyclic"]) for part in parts] == [2, 1, 3]  # records stay what they were


def test_equal_numbers_of_rounds_are_all_told_and_conditions_that_differ():
    whole = pooled([record(24, 2.0), record(24, 2.0, machine="other")])
    assert whole["conditions"]["rounds"] == "24 + 24"
    assert whole["conditions"]["machine"] == "one + other"


def test_one_record_is_itself():
    assert pooled([record(2, 2.0)]) == record(2, 2.0)


def test_records_of_other_contenders_are_refused():
    other = record(1, 2.0)
    other["blocks"]["newer"] = other["blocks"].pop("cyclic")
    with pytest.raises(ValueError, match="one record has a flush, newer, another a flush, cyclic; move those of older"):
        pooled([record(1, 2.0), other])


def test_no_record_is_refused():
    with pytest.raises(ValueError, match="no record"):
        pooled([])
