"""What every test may use: crews of rank processes, one torch thread, and property tests without a deadline.

Equal numbers round alike wherever they lie in memory (MKL's reproducible mode), here and in the processes that tests
start. `MKL_CBWR= make test`, empty, is without.

A store of torch.distributed looks up the name of every process that connects, and blocks all others meanwhile: where no
name server answers, 5 seconds at a time, as long as tests wait for a rank that is to be missed. So it asks but once.

Ranks outnumber processors here, and gloo's threads spin on a lock that a preempted one holds. Under SCHED_BATCH no
thread is preempted because another wakes: the processors' seconds of a test of ranks fell by 40 %. What tests start
inherits it.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # MKL reads it once, so before anything can make a product
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import torch
import torch.distributed as dist
from hypothesis import settings

from brief import measure_briefly
from crew import Crew
from forked import collect_seldom

torch.set_num_threads(1)
measure_briefly()
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Property tests state laws, not speeds: a busy machine must not fail them.
settings.register_profile("laws", deadline=None, max_examples=50)
settings.load_profile("laws")
# A suite started in the background inherits "ignore SIGINT", and would pass that on to the programs it interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


SECONDS = Path(__file__).with_name("seconds.tsv")  # by file, of the longest ones; made by .ci/seconds


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where files are dealt out to several processes, the longest go first: none is left over for one of them."""
    if hasattr(config, "workerinput"):
        told = [line.split("\t") for line in SECONDS.read_text().splitlines()]
        seconds = {file: float(spent) for file, spent in told}
        items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


def pytest_collection_finish() -> None:
    collect_seldom()


@pytest.fixture(scope="session")
def crew() -> Iterator[Callable[[int], Crew]]:
    """crew(n): n rank processes over gloo, started at first use and kept for many tests."""
    crews: dict[int, Crew] = {}

    def of(world: int) -> Crew:
        if world in crews and crews[world].is_worn:
            crews.pop(world).disband()
        if world not in crews:
            crews[world] = Crew(world)
        return crews[world]

    yield of
    for one in crews.values():
        one.dismiss()


@pytest.fixture(autouse=True)
def no_job_left() -> Iterator[None]:
    """A command that a test runs in its own process leaves its job open, as a program does that ends: closed here."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
