"""What gloo sends inside a lab, and what the benchmark's measure makes of it. One job, started once."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.netlab import Lab, LabUnavailable

pytestmark = pytest.mark.netlab

TENSOR_BYTES = 4_000_000  # of rank_that_measures
MEBIBYTE = 2**20
HEADERS = 1.05  # at most 66 bytes for 1448, if a send leaves in the smallest of segments
ACKNOWLEDGEMENTS = 0.05  # at most 66 bytes for 1448 received
SENT_AGAIN = 1.5  # where an acknowledgement is late, for want of a processor; still far from a second tensor
KEEPING = pytest.mark.parametrize("keeping", ["alive", "dropped"])


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What rank 0 of 2 hosts x 2 ranks printed."""
    job = Path(__file__).with_name("rank_that_measures.py")
    try:
        with Lab(2, 0) as lab:
            finished = lab.run([sys.executable, str(job)], ranks_per_host=2, timeout_seconds=100)
    except LabUnavailable as reason:
        pytest.skip(str(reason))
    answer: dict[str, Any] = json.loads(finished.outputs[0])
    return answer


def of_mode(blocks: list[dict[str, Any]], mode: str) -> list[dict[str, Any]]:
    return [block for block in blocks if block["mode"] == mode]


def is_one_tensor(measured: list[float]) -> bool:
    """Each is the tensor and what TCP adds; at least one of them without segments sent again."""
    return TENSOR_BYTES < min(measured) < HEADERS * TENSOR_BYTES and max(measured) < SENT_AGAIN * TENSOR_BYTES


def test_ranks_of_one_host_talk_past_the_link(found):
    """`GLOO_SOCKET_IFNAME=eth0` names the address; the kernel takes its own addresses to `lo`."""
    assert max(found["one host"]) < TENSOR_BYTES / 1000


def test_ranks_of_two_hosts_send_what_the_formula_says(found):
    """2 w (N - 1) / N for N = 2 is w, and headers."""
    assert is_one_tensor(found["one rank of each host"])


def test_every_mode_has_a_turn_in_each_round_and_another_comes_first(found):
    order = [(block["round"], block["mode"]) for block in found["alive"]]
    assert order == [(0, "holding"), (0, "sending"), (1, "sending"), (1, "holding")]


@KEEPING
def test_a_blocks_bytes_are_those_of_one_step_of_its_mode_by_host(found, keeping):
    blocks = of_mode(found[keeping], "sending")
    assert is_one_tensor([block["sent_bytes"][0] for block in blocks])
    assert is_one_tensor([block["received_bytes"][1] for block in blocks])
    assert max(block["sent_bytes"][1] for block in blocks) < ACKNOWLEDGEMENTS * TENSOR_BYTES
    for block in of_mode(found[keeping], "holding"):
        assert max(block["sent_bytes"]) < TENSOR_BYTES / 1000


@KEEPING
def test_a_modes_peak_is_what_it_holds_and_needs_within_a_step_whatever_else_lives(found, keeping):
    for block in of_mode(found[keeping], "holding"):
        assert block["peak_bytes"] == pytest.approx((40 + 36) * MEBIBYTE, abs=2 * MEBIBYTE)


@KEEPING
def test_every_timed_step_is_recorded_and_no_warm_one(found, keeping):
    assert {len(block["step_seconds"]) for block in found[keeping]} == {3}


@KEEPING
def test_a_step_of_rank_zero_takes_no_longer_than_the_whole_block(found, keeping):
    for block in found[keeping]:
        assert sum(block["step_seconds"]) <= 3 * block["wall_seconds"]
