"""Links and processors are what their times say; every rank gets the same answer. Times of a made-up clock where a
figure is checked, real ones where only agreement is."""

import contextlib
import io
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from armillary.exchanges import RankInfo
from armillary.measuring import links as link_timer
from armillary.measuring import measure as links
from armillary.measuring import measure as measure_file
from armillary.measuring import processor as index_timer
from armillary.measuring.links import QUICK, THOROUGH, request_link
from armillary.measuring.measure import measure
from armillary.plans import AllGather, AllReduce, AllToAll, Link, Topology, sent_bytes
from armillary.session.plan_job import open_transport

LINKS = {"AllReduce": Link(1e-4, 1e8), "AllGather": Link(3e-4, 5e7), "AllToAll": Link(2e-3, 2e7)}


class Shaped:
    """A transport of 4 ranks whose requests take the time of known links on a clock of its own."""

    def __init__(self):
        self.place = RankInfo(0, 4)
        self.now = 0.0
        self.largest = 0
        self.burst = self.credit = self.asked = 0.0  # bytes that pass at once after a rest

    def barrier(self):
        self.now += 0.5

    def agree_largest(self, values):
        return list(values)

    def complete(self, program, label):
        request = next(program)
        messages = {AllReduce: 6, AllGather: 3, AllToAll: 1}[type(request)]
        link, sent = LINKS[type(request).__name__], sent_bytes(request, 4, 0)
        credit = min(self.burst, self.credit + (self.now - self.asked) * link.bytes_per_second)
        self.credit = max(0.0, credit - sent)
        self.now += link.seconds(max(0.0, sent - credit), messages)
        self.asked = self.now
        self.largest = max(self.largest, request.tensor.nbytes)


@pytest.fixture
def shaped(monkeypatch):
    transport = Shaped()
    monkeypatch.setattr(link_timer.time, "perf_counter", lambda: transport.now)
    return transport


@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("effort", [QUICK, THOROUGH])
def test_each_kind_of_request_is_fitted_with_the_messages_it_makes(shaped, kind, effort):
    found = request_link(shaped, kind, "between", 4, effort, torch.device("cpu"))
    assert (found.request, found.side) == (kind, "between")
    assert found.link.latency_seconds == pytest.approx(LINKS[kind].latency_seconds, rel=1e-6)
    assert found.link.bytes_per_second == pytest.approx(LINKS[kind].bytes_per_second, rel=1e-6)
    assert found.residual < 1e-6


@pytest.mark.parametrize("kind", LINKS)
def test_a_burst_that_passes_at_once_is_not_taken_for_the_links_speed(shaped, kind):
    shaped.burst = 256e3
    found = request_link(shaped, kind, "between", 4, QUICK, torch.device("cpu"))
    assert found.link.bytes_per_second == pytest.approx(LINKS[kind].bytes_per_second, rel=1e-2)


def test_compute_that_took_longer_alone_makes_no_request_take_no_time(shaped, monkeypatch):
    lasts = iter([1.0] * link_timer.PRODUCTS * QUICK.rows)

    def computed(*_):
        shaped.now += next(lasts, 1e-4)

    monkeypatch.setattr(link_timer.torch, "mm", computed)
    found = request_link(shaped, "AllToAll", "between", 4, QUICK, torch.device("cpu"))
    assert found.link.bytes_per_second == pytest.approx(LINKS["AllToAll"].bytes_per_second, rel=1e-6)


@pytest.mark.parametrize(("every", "paid"), [(3, 0.02 / 3), (64, 0.0)])
@pytest.mark.parametrize("kind", LINKS)
def test_requests_that_wait_for_a_core_count_as_often_as_they_come(shaped, monkeypatch, kind, every, paid):
    """As threads of gloo do: one in three is a part of what a step pays; one in 64 is another program's."""
    complete, asked = shaped.complete, [0]

    def now_and_then(program, label):
        complete(program, label)
        asked[0] += 1
        shaped.now += 0.02 * (asked[0] % every == every - 1)

    monkeypatch.setattr(shaped, "complete", now_and_then)
    monkeypatch.setattr(link_timer, "SIZE_SECONDS", 10.0)
    found = request_link(shaped, kind, "between", 4, QUICK, torch.device("cpu"))
    messages = {"AllReduce": 6, "AllGather": 3, "AllToAll": 1}[kind]
    assert found.link.latency_seconds == pytest.approx(LINKS[kind].latency_seconds + paid / messages, rel=0.1)


def test_a_smallest_request_slower_than_a_larger_one_is_not_the_links_latency(shaped, monkeypatch):
    complete = shaped.complete

    def slow_at_first(program, label):
        complete(iter([request := next(program)]), label)
        shaped.now += 0.005 * (request.tensor.nbytes == QUICK.sizes[0])

    monkeypatch.setattr(shaped, "complete", slow_at_first)
    found = request_link(shaped, "AllToAll", "between", 4, QUICK, torch.device("cpu"))
    assert found.link.latency_seconds == pytest.approx(LINKS["AllToAll"].latency_seconds, rel=1e-6)


def test_a_slow_link_is_not_asked_for_large_messages(shaped, monkeypatch):
    monkeypatch.setitem(LINKS, "AllReduce", Link(1e-4, 1e5))
    found = request_link(shaped, "AllReduce", "between", 4, QUICK, torch.device("cpu"))
    assert shaped.largest < 1 << 20
    assert found.link.bytes_per_second == pytest.approx(1e5, rel=1e-6)


def test_a_link_of_long_latency_is_still_asked_for_messages_that_tell_its_speed(shaped, monkeypatch):
    """30 ms an all-reduce of any size: eight times the size does not take eight times as long."""
    monkeypatch.setitem(LINKS, "AllReduce", Link(5e-3, 1e9))
    found = request_link(shaped, "AllReduce", "between", 4, QUICK, torch.device("cpu"))
    assert shaped.largest >= 1 << 20
    assert found.link.bytes_per_second == pytest.approx(1e9, rel=1e-3)


def test_the_compute_before_a_request_is_not_the_links(shaped, monkeypatch):
    def computed(*_):
        shaped.now += 1e-4

    monkeypatch.setattr(link_timer.torch, "mm", computed)
    found = request_link(shaped, "AllToAll", "between", 4, QUICK, torch.device("cpu"))
    assert found.link.latency_seconds == pytest.approx(LINKS["AllToAll"].latency_seconds, rel=1e-6)


def test_work_that_waits_for_its_turn_counts_with_its_waits(monkeypatch):
    """1 ms a call, and 30 ms more every tenth: the median call would be a quarter of what a call takes."""
    now, calls = [0.0], [0]

    def work():
        calls[0] += 1
        now[0] += 0.001 + (0.03 if calls[0] % 10 == 0 else 0.0)

    monkeypatch.setattr(index_timer.time, "perf_counter", lambda: now[0])
    assert index_timer.Timer(0.2, list, torch.device("cpu")).seconds(work) == pytest.approx(0.004, rel=0.05)


def test_rates_of_index_work_are_those_of_its_times(monkeypatch):
    """A made-up clock: gather, merge and add cost 1, 2, 3 ns a byte and 10, 20, 30 ns a row, in this order."""
    now, calls = [0.0], {"index_select": 1, "merge_rows": 2, "index_add_": 3}

    def clocked(name, work):
        def run(*args):
            rows = args[-1].shape[0]
            width = (args[0].shape[1] if name == "index_select" else args[-1].shape[1]) * 4
            now[0] += calls[name] * (1e-8 * rows + 1e-9 * rows * width)
            return work

        return run

    monkeypatch.setattr(index_timer.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(index_timer, "merge_rows", clocked("merge_rows", None))
    monkeypatch.setattr(torch.Tensor, "index_select", clocked("index_select", None))
    monkeypatch.setattr(torch.Tensor, "index_add_", clocked("index_add_", None))
    found = index_timer.processor(torch.device("cpu"), 1e-3, list)
    for rate, factor in ((found.gather, 1), (found.merge, 2), (found.add, 3)):
        assert rate.row_seconds == pytest.approx(factor * 1e-8, rel=1e-3)
        assert rate.byte_seconds == pytest.approx(factor * 1e-9, rel=1e-3)


def job(rank, workers):
    transport, told = open_transport(), []
    effort = replace(QUICK, sizes=(1 << 10, 1 << 14), rows=2)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as aside:
        patch.setattr(links, "measure", partial(measure, effort=effort, told=told.append))
        found = links.measure_links(transport)
    transport.close()
    return found, told, aside.getvalue()


def test_every_rank_gets_the_same_topology_and_it_survives_a_file(crew, tmp_path):
    (found, told, progress), (other, _, silence) = crew(2).run(job)
    assert found == other
    assert progress.splitlines() == [f"armillary: measuring links {number} of 5" for number in range(1, 6)]
    assert not silence, "rank 0 alone says how far it is"
    assert all(one.scatter > 0 for one in found.requests)
    assert [(one.request, one.side) for one in found.requests] == [("AllReduce", "inside"), ("AllToAll", "inside")]
    assert found.inside == found.requests[0].link and found.link_of("AllToAll", "inside") == found.requests[1].link
    assert found.processor.memory_bytes_per_second > 1e7 and found.processor.merge.seconds(1000, 512) > 0
    for rate in found.processor.updates:  # which is dearer a busy machine may find otherwise: test_tensor_timer.py
        assert 0 <= rate.tensor_seconds < 1e-2 and 0 <= rate.byte_seconds < 1e-6
        assert rate.tensor_seconds + rate.byte_seconds > 0
    assert 0 <= found.processor.landing_seconds < 1e-2  # beside other work nothing may be left of it
    assert [line.split(":")[0] for line in told] == [
        "AllReduce inside nodes", "AllToAll inside nodes", "memory", "a small tensor", "overlap",
        "AllReduce beside compute", "AllToAll beside compute",
    ]  # fmt: skip
    found.save(tmp_path / "topology.json")
    assert Topology.load(tmp_path / "topology.json") == found


class Hosts:
    """A transport of ranks on hosts of these names, each with how many ranks the launcher says it started there."""

    def __init__(self, told):
        self.told = told

    def share(self, _):
        return self.told


HOSTS = {
    "as launched": ([(2, "a"), (2, "a"), (2, "b"), (2, "b")], 2, 2),
    "nodes of one host": ([(1, "a")] * 4, 1, 4),
    "nobody says": ([(0, "a"), (0, "a"), (0, "b"), (0, "b")], 2, 2),
    "a part of one host": ([(4, "a"), (4, "a")], 2, 4),
    "a part of each of two": ([(4, "a"), (4, "a"), (4, "b"), (4, "b")], 2, 4),
    "uneven": ([(3, "a"), (3, "a"), (3, "a"), (1, "b")], 1, 3),
}


@pytest.mark.parametrize("told", HOSTS)
def test_a_node_is_what_is_launched_or_else_has_a_name_and_memory_is_shared_by_all_of_a_host(monkeypatch, told):
    hosts, per_node, beside = HOSTS[told]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(hosts[0][0]))
    monkeypatch.setattr(measure_file.socket, "gethostname", lambda: hosts[0][1])
    assert measure_file.workers_per_node(Hosts(hosts)) == per_node
    assert measure_file.ranks_beside(Hosts(hosts)) == beside
    assert measure_file._uneven(hosts) == ((3, 1) if told == "uneven" else ())


def memory_of_a_rank(rank, workers, launched, is_alone):
    groups = [dist.new_group([one]) for one in range(workers)] if is_alone else [None] * workers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_file, "free_memory_bytes", lambda: 12_000)
        patch.setenv("LOCAL_WORLD_SIZE", str(launched))
        transport = open_transport(groups[rank])
        found = measure(transport, replace(QUICK, sizes=(1 << 10, 1 << 14), rows=2))
        transport.close()
    return found.workers_per_node, found.memory_bytes


def test_what_is_free_on_a_host_is_promised_once_whatever_counts_as_a_node(crew):
    assert crew(2).run(memory_of_a_rank, 1, False) == [(1, 6_000)] * 2
    assert crew(2).run(memory_of_a_rank, 2, True) == [(1, 6_000)] * 2
