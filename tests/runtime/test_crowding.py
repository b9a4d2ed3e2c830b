"""Where ranks outnumber processors no thread pushes another aside; elsewhere, and afterwards, all is as it was."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from armillary.runtime.crowding import give_way, machine
from armillary.runtime.transport import Transport

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="no scheduling policies on this system")


def policies():
    found = []
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            found.append(os.sched_getscheduler(thread))
        except ProcessLookupError:
            continue
    return set(found)


@pytest.fixture
def idle_thread():
    """One more thread than the one that calls."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    yield thread
    ended.set()
    thread.join()


def crowd(ranks):
    return [machine()] * ranks


def test_the_machine_has_one_name_in_every_process():
    told = subprocess.run(
        [sys.executable, "-c", "from armillary.runtime.crowding import machine; print(machine())"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.strip() == machine() != ""


@pytest.mark.parametrize("threads", [1, 2])
def test_it_begins_with_the_first_rank_too_many_and_counts_this_machine_alone(monkeypatch, idle_thread, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    for ranks in (1, 4 // threads, 4 // threads + 1):
        stop = give_way([*crowd(ranks), "another", "another", "another", "another", "another"])
        assert policies() == {os.SCHED_BATCH if ranks * threads > 4 else os.SCHED_OTHER}
        stop()
        assert policies() == {os.SCHED_OTHER}


def test_threads_that_begin_later_do_as_the_others(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    stop = give_way(crowd(1000))
    seen = []
    thread = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(threading.get_native_id())))
    thread.start()
    thread.join()
    stop()
    assert seen == [os.SCHED_BATCH] and policies() == {os.SCHED_OTHER}


def test_the_first_to_begin_is_who_ends_it(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    stop, stop_inner = give_way(crowd(1000)), give_way(crowd(1000))
    stop_inner()
    assert policies() == {os.SCHED_BATCH}
    stop()
    assert policies() == {os.SCHED_OTHER}


def test_a_policy_that_somebody_chose_is_kept(idle_thread):
    """In a process of its own, as what is idle stays so without privilege."""
    code = (
        "import os; from armillary.runtime.crowding import give_way, machine\n"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        "stop = give_way([machine()] * 1000)\n"
        "kept = os.sched_getscheduler(0); stop(); print(kept == os.sched_getscheduler(0) == os.SCHED_IDLE)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "True"


def test_without_policies_nothing_is_asked_of_the_system(monkeypatch):
    monkeypatch.delattr(os, "sched_setscheduler")
    give_way(crowd(1000))()
    assert policies() == {os.SCHED_OTHER}


def of_a_transport(rank, world, processors):
    torch.set_num_threads(1)
    for thread in map(int, os.listdir("/proc/self/task")):  # whatever a job before this one left open
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
    asked, os.sched_getaffinity = os.sched_getaffinity, lambda _: set(range(processors))
    before = policies()
    transport = Transport()
    during = policies()
    transport.close()
    os.sched_getaffinity = asked
    return before, during, policies()


@pytest.mark.parametrize("processors", [1, 2, 3])
def test_a_transport_gives_way_from_its_opening_to_its_closing(crew, processors):
    for before, during, after in crew(2).run(of_a_transport, processors):
        assert before == after == {os.SCHED_OTHER}
        assert during == {os.SCHED_BATCH if processors < 2 else os.SCHED_OTHER}
