"""A topology refuses nonsense, survives JSON whole, and says who shares a node and who a rail."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.plans import TURN_BYTES, TURN_SECONDS, Link, Processor, RequestLink, RowRate, Topology, members

LINK = Link(1e-4, 1e8)
RATE = RowRate(1e-6, 1e-8, 1e-10, 0.1)
TOPOLOGY = Topology(3, 2, LINK, Link(2e-4, 1e7), 1 << 30)


def test_one_written_by_hand_needs_no_measurements():
    fields = json.loads(TOPOLOGY.to_json())
    del fields["requests"], fields["processor"]
    assert Topology.from_json(json.dumps(fields)) == TOPOLOGY


def test_it_survives_a_file_whole(tmp_path):
    TOPOLOGY.save(tmp_path / "cluster.json")
    assert Topology.load(tmp_path / "cluster.json") == TOPOLOGY


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 4}, {"workers_per_node": 1}, {"inside": Link(1e-4, 2e8)}, {"between": Link(0.0, 1e7)},
        {"memory_bytes": 1 << 31}, {"backend": "nccl"}, {"requests": (RequestLink("AllReduce", "inside", LINK),)},
        {"processor": Processor(RATE, RATE, RATE, 1e9)},
        {"requests": (RequestLink("AllReduce", "inside", LINK, beside_seconds=1e-3),)},
    ],
)  # fmt: skip
def test_whatever_a_plan_depends_on_changes_the_fingerprint(change):
    other = replace(TOPOLOGY, **change)
    assert other.fingerprint != TOPOLOGY.fingerprint == Topology.from_json(TOPOLOGY.to_json()).fingerprint


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"nodes": 0}, "at least one node of one worker, got 0 x 2"),
        ({"workers_per_node": 0}, "got 3 x 0"),
        ({"memory_bytes": 0}, "memory_bytes must be positive, got 0"),
    ],
)
def test_nonsense_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        replace(TOPOLOGY, **change)


@pytest.mark.parametrize(("latency", "rate"), [(-1e-6, 1e8), (1e-4, 0.0), (float("nan"), 1e8), (1e-4, float("nan"))])
def test_a_link_that_cannot_be_is_refused(latency, rate):
    with pytest.raises(ValueError, match="latency_seconds >= 0 and bytes_per_second > 0"):
        Link(latency, rate)


def test_a_link_charges_latency_per_message_and_bandwidth_once():
    assert LINK.seconds(1e8, messages=3) == pytest.approx(1.0003)
    assert TOPOLOGY.link == TOPOLOGY.between
    assert replace(TOPOLOGY, nodes=1).link == TOPOLOGY.inside


@given(nodes=st.integers(1, 5), per_node=st.integers(1, 5))
def test_nodes_and_rails_each_deal_every_rank_once(nodes, per_node):
    topology = Topology(nodes, per_node, LINK, LINK, 1)
    for scope, shared in (("node", topology.node_of), ("rail", lambda rank: rank % per_node)):
        groups = members(scope, topology.workers, per_node)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(topology.workers))
        for ranks in groups:
            assert len({shared(rank) for rank in ranks}) == 1 and ranks == sorted(ranks)
    assert members("world", topology.workers, per_node) == [list(range(topology.workers))]


def test_a_request_finds_the_link_that_was_measured_for_it_on_that_side():
    quick, slow = RequestLink("AllToAll", "inside", Link(0.0, 3.0)), RequestLink("AllToAll", "between", Link(0.0, 2.0))
    measured = replace(TOPOLOGY, requests=(quick, slow))
    assert measured.link_of("AllToAll", "inside") == quick.link and measured.link_of("AllToAll", "between") == slow.link
    assert measured.link_of("AllReduce", "inside") == TOPOLOGY.inside
    assert measured.link_of("AllReduce", "between") == TOPOLOGY.between


def test_the_same_machines_for_another_number_of_workers():
    assert (TOPOLOGY.of(8).nodes, TOPOLOGY.of(8).workers_per_node) == (4, 2)
    one = replace(TOPOLOGY, nodes=1)
    assert (one.of(7).nodes, one.of(7).workers_per_node) == (1, 7)
    with pytest.raises(ValueError, match="5 workers do not fill nodes of 2"):
        TOPOLOGY.of(5)


@pytest.mark.parametrize("rates", [{"row_seconds": -1.0}, {"byte_seconds": float("nan")}])
def test_a_rate_that_cannot_be_is_refused(rates):
    with pytest.raises(ValueError, match="rates of index work must not be negative"):
        RowRate(**{"call_seconds": 0.0, "row_seconds": 0.0, "byte_seconds": 0.0, **rates})
    with pytest.raises(ValueError, match="memory_bytes_per_second > 0"):
        Processor(RATE, RATE, RATE, 0.0)
    with pytest.raises(ValueError, match="none of inside, between"):
        RequestLink("AllReduce", "beside", LINK)
    with pytest.raises(ValueError, match="beside_seconds of AllReduce must be >= 0"):
        RequestLink("AllReduce", "inside", LINK, beside_seconds=-1e-3)


def test_what_nobody_measured_beside_compute_is_taken_to_be_as_the_slowest_that_was():
    told = [("AllReduce", "inside", 1e-3), ("AllReduce", "between", 2e-3), ("AllToAll", "inside", 4e-3)]
    known = replace(TOPOLOGY, requests=tuple(RequestLink(kind, side, LINK, 0.0, taken) for kind, side, taken in told))
    assert [known.beside_seconds(kind) for kind in ("AllReduce", "AllToAll", "AllGather")] == [2e-3, 4e-3, 4e-3]
    assert TOPOLOGY.beside_seconds("AllReduce") == 0.0
    assert known.of_one_node(1).beside_seconds("AllReduce") == 0.0


@pytest.mark.parametrize(("nodes", "bytes_per_second"), [(1, 1e9), (2, 1e7)])
def test_how_long_a_piece_may_be_that_takes_no_turn_is_the_slowest_links_to_say(nodes, bytes_per_second):
    topology = Topology(nodes, 2, Link(1e-5, 1e9), Link(1e-4, 1e7), 1 << 30)
    assert topology.turn_bytes == round(bytes_per_second * TURN_SECONDS)
    assert abs(replace(topology, nodes=2, between=Link(1e-4, 12e6)).turn_bytes - TURN_BYTES) < 1000
