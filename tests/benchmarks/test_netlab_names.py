"""Names, numbers and refusals of the lab: what needs neither root nor a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.netlab.command import main
from benchmarks.netlab.counters import Counted, counted_bytes
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.namespaces import LabName, is_owned, name_of, new_name, start_ticks
from benchmarks.netlab.pinning import prefix
from benchmarks.netlab.ranks import Crowd, torchrun_variables, words

ROOT = Path(__file__).resolve().parents[2]


def test_a_namespace_names_the_lab_it_belongs_to():
    name = new_name()
    assert name_of(name.switch) == name_of(name.host(11)) == name


@pytest.mark.parametrize("namespace", ["armada", "arm", "arm-1-2-3", "arm-1-2-3-host", "xarm-1-2-3-host0", "blue"])
def test_a_namespace_of_somebody_else_is_no_labs(namespace):
    assert name_of(namespace) is None


def test_a_lab_is_owned_by_the_process_that_named_it():
    assert is_owned(new_name())


def test_a_process_that_got_the_pid_of_a_dead_owner_owns_nothing():
    start = start_ticks(os.getpid())
    assert start is not None
    assert not is_owned(LabName(os.getpid(), start - 1, 0))


def test_a_process_that_waits_to_be_reaped_owns_nothing():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        start = start_ticks(child.pid)
        assert start is not None and is_owned(LabName(child.pid, start, 0))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and left a zombie
        assert not is_owned(LabName(child.pid, start, 0))


def test_ranks_are_numbered_as_torchrun_numbers_them():
    crowd = Crowd(("a", "b", "c"), ranks_per_host=2, master_address="10.77.0.1", master_port=29500)
    told = [torchrun_variables(crowd, rank) for rank in range(crowd.world)]
    assert [(t["RANK"], t["GROUP_RANK"], t["LOCAL_RANK"]) for t in told] == [
        ("0", "0", "0"),
        ("1", "0", "1"),
        ("2", "1", "0"),
        ("3", "1", "1"),
        ("4", "2", "0"),
        ("5", "2", "1"),
    ]
    assert {(t["WORLD_SIZE"], t["LOCAL_WORLD_SIZE"], t["MASTER_ADDR"]) for t in told} == {("6", "2", "10.77.0.1")}


def test_ranks_are_dealt_out_over_processors_where_as_many_come_on_each():
    batch = ("chrt", "--batch", "0")
    assert [prefix(rank, 4, (1, 3)) for rank in range(4)] == [("taskset", "--cpu-list", c, *batch) for c in "1313"]
    assert {prefix(rank, 5, (1, 3)) for rank in range(5)} == {batch}
    assert {prefix(rank, 2, (1, 3)) for rank in range(2)} == {()}


def test_no_rank_is_kept_anywhere_unless_all_are():
    free, kept = (Crowd(("a", "b"), 1, "10.77.0.1", 29500, processors) for processors in ((), (7,)))
    command = ["python", "train.py"]
    assert words(free, 1, command) == ["ip", "netns", "exec", "b", *command]
    assert words(kept, 1, command) == ["ip", "netns", "exec", "b", *prefix(1, 2, (7,)), *command]


def test_counters_are_refused_outside_a_lab():
    with pytest.raises(RuntimeError, match=r"no lab's .* start it with"):
        counted_bytes()


def test_bytes_counted_between_two_readings_cannot_be_negative():
    assert Counted(30, 20, 9) - Counted(10, 5, 2) == Counted(20, 15, 7)
    assert Counted(2 * 1514 + 66, 0, 3).sent_payload_bytes == 2 * 1448, "two full packets and an acknowledgement"
    with pytest.raises(ValueError, match="want bytes >= 0"):
        Counted(10, 5) - Counted(30, 5)


@pytest.mark.parametrize("hosts", [0, -1, 251])
def test_a_lab_without_hosts_or_with_more_than_addresses_is_refused(hosts):
    with pytest.raises(ValueError, match=f"hosts must be 1 to 250, got {hosts}"):
        Lab(hosts, 100)


@pytest.mark.parametrize("speed", [-1, float("inf"), float("nan")])
def test_a_speed_that_is_none_is_refused(speed):
    with pytest.raises(ValueError, match=f"0 \\(unshaped\\) or more, got {speed}"):
        Lab(2, speed)


def test_a_lab_that_is_not_open_runs_nothing():
    with pytest.raises(RuntimeError, match="is not open"):
        Lab(2, 100).run(["true"])


@pytest.mark.parametrize(
    "words", [[], ["2"], ["2", "100"], ["--", "true"], ["2", "--", "true"], ["2", "100", "--"], ["2", "100", "--sweep"]]
)
def test_half_a_command_line_is_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "netlab: error: want" in capsys.readouterr().err


def test_without_iproute2_the_command_says_so_in_one_line_and_ends_with_three():
    command = [sys.executable, "benchmarks/netlab", "2", "100", "--", "true"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("netlab: needs ") and done.stderr.count("\n") == 1
    assert done.stdout == ""
