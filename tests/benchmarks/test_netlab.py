"""The lab itself: links with a speed, bytes counted where they cross, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.netlab import Counted, Lab, LabUnavailable, RankFailed, sweep
from benchmarks.netlab.namespaces import NAMED, LabName, name_of, namespaces_of, start_ticks, tell

pytestmark = pytest.mark.netlab

ROOT = Path(__file__).resolve().parents[2]
SENDING = [sys.executable, "-S", str(Path(__file__).with_name("rank_that_sends.py"))]
BURST_BYTES = 16 * 1024


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    try:
        with Lab(1, 100):
            pass
    except LabUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Three hosts; a test sets the speed it needs."""
    with Lab(3, 0) as opened:
        yield opened


def crossed(lab: Lab, act: Callable[[], object]) -> list[Counted]:
    """What was counted on every host during `act`."""
    before = lab.counters()
    act()
    return [now - then for now, then in zip(lab.counters(), before)]


def transfers(lab: Lab, sent_bytes: int, *pairs: str) -> list[tuple[float, int]]:
    """Of each transfer of `sent_bytes`: seconds until it was received; bytes sent for it, any sent again included."""
    finished = lab.run([*SENDING, str(sent_bytes), *pairs], timeout_seconds=20)
    said = [line.split() for output in finished.outputs for line in output.splitlines()]
    return [(float(seconds), int(sent)) for seconds, sent in said]


def slowest(lab: Lab, sent_bytes: int, *pairs: str) -> float:
    """Seconds until the last of the transfers, each of `sent_bytes`, was received."""
    return max(seconds for seconds, _ in transfers(lab, sent_bytes, *pairs))


def wait_until(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_nobody_speaks_on_a_lab_but_its_ranks(lab):
    assert crossed(lab, lambda: lab.run(["sleep", "0.3"])) == [Counted(0, 0)] * 3


def test_connections_are_paced_as_the_lab_says_and_not_as_the_machine_does(lab):
    finished = lab.run(["cat", "/proc/sys/net/ipv4/tcp_congestion_control"], timeout_seconds=20)
    assert [output.strip() for output in finished.outputs] == ["reno"] * 3


def test_the_kernel_counts_what_crosses_and_on_the_hosts_it_crosses(lab):
    sent_bytes = 3_000_000
    lab.shape(0)
    said: list[tuple[float, int]] = []
    zero, one, two = crossed(lab, lambda: said.extend(transfers(lab, sent_bytes, "1-2")))
    ((_, by_tcp),) = said  # more than was sent where an acknowledgement came late
    assert sent_bytes <= by_tcp < one.sent_bytes == two.received_bytes < 1.05 * by_tcp  # headers: at most 66 for 1448
    assert two.sent_bytes == one.received_bytes < 0.05 * sent_bytes  # acknowledgements: the same
    assert zero.sent_bytes + zero.received_bytes < 1000  # who has which address


@pytest.mark.parametrize("pairs", [("1-0", "2-0"), ("0-1", "0-2")], ids=["two to one", "one to two"])
def test_a_link_holds_its_speed_in_both_directions(lab, pairs):
    """Shaped at one end only, one of the cases would take half the time. The transfers may start 0.3 s apart, as each
    is a process: so much less the slower one takes."""
    sent_bytes = 6_000_000
    lab.shape(100)
    shaped_seconds = slowest(lab, sent_bytes, *pairs)
    least_seconds = 0.65 * (2 * sent_bytes - 2 * BURST_BYTES) * 8 / 100e6
    lab.shape(0)
    assert shaped_seconds > least_seconds > slowest(lab, sent_bytes, *pairs)


def test_whole_packets_are_few_and_the_link_holds_its_speed():
    sent_bytes = 3_000_000
    with Lab(2, 100, whole_packets=True) as whole:
        whole.shape(50)
        whole.shape(100)  # anew over one that is there
        found: list[float] = []
        sender, _ = crossed(whole, lambda: found.append(slowest(whole, sent_bytes, "0-1")))
    assert found[0] > 0.8 * (sent_bytes - 2 * (64 << 10)) * 8 / 100e6
    assert sender.sent_packets < sent_bytes / 1448 / 5


def test_ranks_run_on_the_hosts_they_are_told_they_run_on(lab):
    finished = lab.run(["cat", "/sys/class/net/eth0/address"], ranks_per_host=2)
    assert [output.strip()[-2:] for output in finished.outputs] == ["00", "00", "01", "01", "02", "02"]


def test_ranks_are_pinned_alike_and_only_where_it_is_asked_for(lab):
    processors = sorted(os.sched_getaffinity(0))
    asked = "import os; print(os.sched_getscheduler(0), *sorted(os.sched_getaffinity(0)))"

    def told(**how: bool) -> list[str]:
        finished = lab.run([sys.executable, "-S", "-c", asked], ranks_per_host=len(processors), **how)
        return [output.strip() for output in finished.outputs]

    everywhere = " ".join(map(str, [os.sched_getscheduler(0), *processors]))
    assert told() == [everywhere] * 3 * len(processors)
    assert told(pin=True) == [f"{os.SCHED_BATCH} {processor}" for processor in processors] * 3


def test_two_labs_at_once_share_nothing(lab):
    with Lab(2, 0) as other:
        counted = crossed(lab, lambda: slowest(other, 100_000, "0-1"))
        assert other.counters()[0].sent_bytes > 100_000
    assert counted == [Counted(0, 0)] * 3
    assert len(namespaces_of(lab.name)) == 4


def test_the_machines_own_network_stays_as_it_was():
    def seen() -> str:
        return tell("ip", "-o", "link") + tell("ip", "route") + tell("tc", "qdisc")

    before = seen()
    with Lab(2, 100):
        assert seen() == before


def test_words_of_rank_zero_are_seen_while_it_runs(lab):
    seen: list[tuple[float, str]] = []
    script = 'echo "rank $RANK of $WORLD_SIZE on $GROUP_RANK says $WORD"; sleep 0.5; echo done'
    finished = lab.run(
        ["sh", "-c", script],
        ranks_per_host=2,
        env={"WORD": "so"},
        watch=lambda text: seen.append((time.perf_counter(), text)),
    )
    (first_at, first), (last_at, last) = seen
    assert (first, last) == ("rank 0 of 6 on 0 says so\n", "done\n") and last_at - first_at > 0.3
    assert finished.outputs[5] == "rank 5 of 6 on 2 says so\ndone\n"


def test_the_first_rank_to_fail_is_named_and_the_rest_are_stopped(lab):
    """Rank 2 trips over what rank 1 did and is gone before it."""
    scripts = ("sleep 60", "sleep 0.1; echo the cause >&2; sleep 0.2; exit 7", "sleep 0.15; echo tripped >&2; exit 8")
    script = f"case $RANK in 0) {scripts[0]};; 1) {scripts[1]};; 2) {scripts[2]};; esac"
    begun = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 on host 1 ended with exit code 7 \(2 of 3 .*\n.*the cause"):
        lab.run(["sh", "-c", script])
    assert time.monotonic() - begun < 10
    assert [tell("ip", "netns", "pids", lab.name.host(host)) for host in range(3)] == [""] * 3


def test_a_run_that_takes_too_long_is_stopped_with_all_it_started(lab):
    with pytest.raises(TimeoutError, match=r"ranks \[0, 2\] still run after 0.3 s .* rank 0 said:\nstuck"):
        lab.run(["sh", "-c", "test $RANK = 1 && exit; echo stuck >&2; sleep 60 & sleep 60"], timeout_seconds=0.3)
    assert [tell("ip", "netns", "pids", lab.name.host(host)) for host in range(3)] == [""] * 3


def test_a_block_that_raises_leaves_no_lab():
    opened = Lab(2, 100)

    def fail_inside() -> None:
        with opened:
            assert len(namespaces_of(opened.name)) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert namespaces_of(opened.name) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_lab_and_no_rank_outlives_its_process(how):
    command = [sys.executable, "benchmarks/netlab", "2", "100", "--", "sh", "-c", "echo $$; sleep 60"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        assert owner.stdout is not None
        rank = int(owner.stdout.readline())
        started = start_ticks(rank)
        assert started is not None and _labs_of(owner.pid)
        os.kill(owner.pid, how)
        owner.wait(5)
    assert wait_until(lambda: not _labs_of(owner.pid), seconds=5)
    assert start_ticks(rank) != started


def test_a_sweep_removes_the_labs_of_the_dead_and_no_others(lab):
    with subprocess.Popen(["true"]) as dead:
        pass
    left_behind = LabName(dead.pid, 1, 1).host(0)
    for namespace in (left_behind, "armada"):
        tell("ip", "netns", "add", namespace)
    with subprocess.Popen(["ip", "netns", "exec", left_behind, "sleep", "60"]) as straggler:
        assert wait_until(lambda: tell("ip", "netns", "pids", left_behind) != "", seconds=5)
        gone = sweep()
        assert straggler.wait(5) == -signal.SIGKILL
    kept = (NAMED / "armada").exists()
    tell("ip", "netns", "delete", "armada")
    assert left_behind in gone and "armada" not in gone and kept
    assert len(namespaces_of(lab.name)) == 4


def _labs_of(pid: int) -> set[str]:
    return {path.name for path in NAMED.iterdir() if (name := name_of(path.name)) and name.pid == pid}
