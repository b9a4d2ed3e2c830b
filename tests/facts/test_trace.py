"""A trace: what its figures are, and the file that a trace viewer opens."""

import json
from itertools import pairwise

import pytest

from armillary.plans import Record, Trace

RANKS = (
    (
        Record(7, "emb", "AllToAll", 0.0, 0.5, 100.0),
        Record(7, "bucket 0", "AllReduce", 0.25, 0.25, 40.0),
        Record(7, "emb", "AllToAll", 0.25, 1.0, 60.0),  # while the first is under way
        Record(8, "emb", "AllToAll", 2.0, 0.25, 100.0),
    ),
    (
        Record(7, "emb", "AllToAll", 0.25, 0.25, 100.0),
        Record(7, "bucket 0", "AllReduce", 0.0, 0.5, 40.0),
        Record(7, "emb", "AllToAll", 0.5, 0.75, 60.0),
        Record(8, "emb", "AllToAll", 1.0, 1.25, 100.0),
    ),
)
TRACE = Trace(RANKS)


def test_a_trace_survives_its_file(tmp_path):
    TRACE.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == TRACE


def test_the_file_is_a_chrome_trace_with_a_process_a_rank_and_times_in_microseconds():
    """As the Trace Event Format wants it: complete events on a thread do not overlap, as else they cannot be drawn."""
    trace = json.loads(TRACE.to_json())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == 8 and drawn[0]["name"] == "emb AllToAll" and drawn[0]["args"]["step"] == 7
    assert (drawn[2]["ts"], drawn[2]["dur"]) == (250_000.0, 1_000_000.0)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert sorted(threads.values()) == ["bucket 0", "bucket 0", "emb", "emb", "emb", "emb"]
    for place, group in threads.items():
        mine = [event for event in drawn if (event["pid"], event["tid"]) == place]
        assert {event["args"]["group"] for event in mine} == {group}
        for one, other in pairwise(mine):
            assert one["ts"] + one["dur"] <= other["ts"]


def test_what_a_rank_waits_for_another_that_asks_later_is_not_counted():
    assert TRACE.joint_seconds() == {("emb", 7): 0.25 + 0.75, ("bucket 0", 7): 0.25, ("emb", 8): 0.25}


def test_ranks_whose_requests_do_not_match_count_as_the_quickest():
    uneven = Trace((RANKS[0], RANKS[1][1:]))
    assert uneven.joint_seconds()["emb", 7] == min(0.5 + 1.0, 0.75)
    assert Trace(()).joint_seconds() == {}


def test_a_file_of_the_old_format_is_refused():
    with pytest.raises(ValueError, match=r"has no traceEvents \(older versions"):
        Trace.from_json(json.dumps({"rank": 0, "records": []}))


def test_a_record_with_negative_figures_is_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        Record(0, "emb", "AllToAll", 0.0, -1.0, 0.0)
