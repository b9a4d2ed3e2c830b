"""Crowded ranks push nobody aside and are dealt out over processors; elsewhere, and afterwards, all is as it was."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from armillary.runtime.crowding import Quarters, give_way, quarters
from armillary.runtime.transport import Transport

MINE = quarters()  # before anything is kept to one of them
EVERYWHERE = {frozenset(MINE.processors)}
pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no scheduling policies on this system")


def of_threads(asked):
    found = set()
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            answer = asked(thread)
        except ProcessLookupError:
            continue
        found.add(frozenset(answer) if isinstance(answer, set) else answer)
    return found


def policies():
    return of_threads(os.sched_getscheduler)


def processors():
    return of_threads(os.sched_getaffinity)


def untouched(policies_now, processors_now):
    return policies_now == {os.SCHED_OTHER} and processors_now == EVERYWHERE


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
    return [MINE] * ranks


def test_quarters_are_the_same_in_every_process():
    told = subprocess.run(
        [sys.executable, "-c", "from armillary.runtime.crowding import quarters; print(quarters())"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.strip() == str(MINE) and MINE.machine and MINE.processors


@pytest.mark.parametrize("threads", [1, 2])
def test_it_begins_with_the_first_rank_too_many_and_counts_its_own_quarters_alone(monkeypatch, idle_thread, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    here = Quarters(MINE.machine, tuple(range(4)))  # not this process's, so that nothing is kept to them
    others = [Quarters("another", here.processors), Quarters(here.machine, tuple(range(4, 8)))]
    for ranks in (1, 4 // threads, 4 // threads + 1):
        stop = give_way([*others * 3, *[here] * ranks, *others * 3], 6)
        assert policies() == {os.SCHED_BATCH if ranks * threads > 4 else os.SCHED_OTHER}
        stop()
        assert untouched(policies(), processors())


def test_ranks_are_dealt_out_one_by_one_over_the_processors_of_their_own_quarters(idle_thread):
    everyones = [Quarters("another", MINE.processors), MINE] * 2 * len(MINE.processors)
    kept = []
    for rank, theirs in enumerate(everyones):
        if theirs == MINE:
            stop = give_way(everyones, rank)
            kept.append(processors())
            stop()
            assert untouched(policies(), processors())
    assert kept == [{frozenset([processor])} for processor in MINE.processors] * 2


@pytest.mark.skipif(len(MINE.processors) < 2, reason="one processor, which ranks always share evenly")
def test_ranks_that_cannot_be_dealt_out_evenly_are_left_to_the_kernel():
    everyones = crowd(2 * len(MINE.processors) + 1)
    for rank in range(len(everyones)):
        stop = give_way(everyones, rank)
        assert policies() == {os.SCHED_BATCH} and processors() == EVERYWHERE
        stop()


def test_ranks_of_several_threads_are_left_to_the_kernel(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    stop = give_way(crowd(2 * len(MINE.processors)), 0)
    assert policies() == {os.SCHED_BATCH} and processors() == EVERYWHERE
    stop()


def test_threads_that_begin_later_do_as_the_others():
    seen = []

    def look():
        me = threading.get_native_id()
        seen.append((os.sched_getscheduler(me), os.sched_getaffinity(me)))

    stop = give_way(crowd(2 * len(MINE.processors)), 1)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    stop()
    assert seen == [(os.SCHED_BATCH, {MINE.processors[1 % len(MINE.processors)]})]
    assert untouched(policies(), processors())


def test_the_first_to_begin_is_who_ends_it():
    ranks = 2 * len(MINE.processors)
    stop, stop_inner = give_way(crowd(ranks), 0), give_way(crowd(ranks), 0)
    stop_inner()
    assert policies() == {os.SCHED_BATCH} and processors() == {frozenset(MINE.processors[:1])}
    stop()
    assert untouched(policies(), processors())


@pytest.mark.skipif(len(MINE.processors) < 2, reason="one processor, to which nobody can keep")
def test_a_thread_that_somebody_gave_a_processor_keeps_it(idle_thread):
    os.sched_setaffinity(idle_thread.native_id, {MINE.processors[1]})
    stop = give_way(crowd(2 * len(MINE.processors)), 0)
    assert os.sched_getaffinity(idle_thread.native_id) == {MINE.processors[1]}
    stop()
    assert os.sched_getaffinity(idle_thread.native_id) == {MINE.processors[1]}


def test_a_policy_that_somebody_chose_is_kept_and_the_processors_with_it():
    """In a process of its own, as what is idle stays so without privilege."""
    code = (
        "import os; from armillary.runtime.crowding import give_way, quarters\n"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); mine = quarters()\n"
        "stop = give_way([mine] * 1000 * len(mine.processors), 0)\n"
        "kept = os.sched_getscheduler(0) == os.SCHED_IDLE and quarters() == mine; stop()\n"
        "print(kept and os.sched_getscheduler(0) == os.SCHED_IDLE and quarters() == mine)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "True"


def test_without_policies_nothing_is_asked_of_the_system(monkeypatch):
    everyones = crowd(2 * len(MINE.processors))
    monkeypatch.delattr(os, "SCHED_BATCH")
    monkeypatch.delattr(os, "sched_setscheduler")
    monkeypatch.delattr(os, "sched_setaffinity")
    give_way(everyones, 0)()
    assert untouched(policies(), processors())


def test_a_sandbox_that_does_not_allow_it_stops_nobody(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    give_way(crowd(2 * len(MINE.processors)), 0)()
    assert untouched(policies(), processors())


def of_a_transport(rank, world, allowed, whole):
    torch.set_num_threads(1)
    for thread in map(int, os.listdir("/proc/self/task")):  # whatever a job before this one left open
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(thread, allowed)
    before = policies(), processors()
    transport = Transport()
    during = policies(), processors()
    transport.close()
    after = policies(), processors()
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, whole)
    return before, during, after


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (2, 2), (4, 2)])
def test_a_transport_gives_way_from_its_opening_to_its_closing(crew, ranks, count):
    allowed = MINE.processors[:count]
    if len(allowed) < count:
        pytest.skip(f"{count} processors wanted")
    everywhere = {os.SCHED_OTHER}, {frozenset(allowed)}
    for rank, (before, during, after) in enumerate(crew(ranks).run(of_a_transport, allowed, MINE.processors)):
        assert before == after == everywhere
        crowded = {os.SCHED_BATCH}, {frozenset([allowed[rank % count]])}
        assert during == (crowded if ranks > count else everywhere)
