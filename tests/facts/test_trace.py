"""A trace survives its file, and adds up per step and group."""

import pytest

from armillary.facts.trace import Record, Trace

TRACE = Trace(
    1,
    (
        Record(0, "table", "AllToAll", 0.0, 0.5, 100.0),
        Record(0, "table", "AllToAll", 1.0, 0.25, 50.0),
        Record(0, "dense", "AllReduce", 2.0, 1.0, 8.0),
        Record(1, "table", "AllToAll", 3.0, 0.25, 150.0),
    ),
)


def test_it_survives_a_file_whole(tmp_path):
    TRACE.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == TRACE


def test_means_are_over_steps_not_over_records():
    assert TRACE.sent_bytes_per_step() == {"table": 150.0, "dense": 4.0}
    assert TRACE.seconds_per_step() == {"table": 0.5, "dense": 0.5}


def test_an_empty_trace_is_no_division_by_zero():
    assert Trace(0, ()).sent_bytes_per_step() == {} == Trace(0, ()).seconds_per_step()


@pytest.mark.parametrize(("seconds", "sent"), [(-0.1, 0.0), (0.0, -1.0)])
def test_negative_costs_are_refused(seconds, sent):
    with pytest.raises(ValueError, match="must not be negative"):
        Record(0, "table", "AllToAll", 0.0, seconds, sent)
