"""The process is its user's: ranks that outnumber their processors keep the policy and processors they were given."""

import os

import pytest
import torch

from armillary.plans import AllReduce, AllToAll
from armillary.transport.transport import Transport

HERE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(not HERE, reason="no scheduling policies on this system")


def threads():
    """By thread of this process: its policy and its processors."""
    found = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            found[thread] = os.sched_getscheduler(thread), frozenset(os.sched_getaffinity(thread))
        except ProcessLookupError:  # ended meanwhile
            continue
    return found


def give(processors, policy=os.SCHED_OTHER):
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, processors)
        os.sched_setscheduler(thread, policy, os.sched_param(0))


def looked_at(rank, world, allowed):
    """Before a transport, with its threads at work, and after it."""
    policy = os.sched_getscheduler(0)
    give(allowed)
    before = threads()
    transport = Transport()
    ones, even = torch.ones(world * 20_000), (20_000,) * world  # pieces that take turns: a thread sees to them
    for request in (AllToAll(ones, even, even), AllReduce(ones)):
        transport.start(request, "ones")()
    during = threads()
    transport.barrier()
    transport.close()
    after = threads()
    give(HERE, policy)
    return before, during, after


@pytest.mark.parametrize("count", [1, 2])
def test_a_transport_changes_no_thread_and_starts_none_elsewhere(crew, count):
    if len(HERE) < count:
        pytest.skip(f"{count} processors wanted")
    allowed = frozenset(HERE[:count])
    for before, during, after in crew(4).run(looked_at, allowed):
        assert set(before.values()) == {(os.SCHED_OTHER, allowed)}
        assert len(during) > len(before), "a transport has threads of its own"
        assert set(during.values()) == set(after.values()) == set(before.values())
