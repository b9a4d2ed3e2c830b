"""The measurement at the start of a job, in a tenth of its processor seconds: for tests of all that comes after it.

Such tests plan for any machine, so what they ask of a plan cannot hang on how well this one was timed. The code is the
library's own and runs whole, on smaller messages, in fewer rows and rounds. The links of the same ranks are measured
once: a crew runs many jobs, and a test process starts many commands, all on the same machine. Tests of measurement
itself call it in its own file, `armillary.measuring.measure` or `armillary.profiler.probe`. Commands that start Python
anew measure in full.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from armillary.measuring import links as link_timer
from armillary.measuring import links as overlap_timer
from armillary.measuring import measure
from armillary.measuring import processor as index_timer
from armillary.plans import Profile, Topology
from armillary.profiler import probe as at_once
from armillary.session import parallelize
from armillary.session import plan_job as decide
from armillary.transport.transport import Transport

EFFORT = link_timer.Effort(("AllReduce", "AllToAll"), (1 << 10, 1 << 14, 1 << 17), 3, 0.2)
SHORTER = {
    (link_timer, "SIZE_SECONDS"): 0.002,
    (link_timer, "PRODUCTS"): 2,
    (measure, "BLOCK_SECONDS"): 0.001,
    (index_timer, "TABLE_BYTES"): 1 << 20,
    (index_timer, "COPIED_BYTES"): 1 << 22,
    (overlap_timer, "LONG_SECONDS"): 0.002,
    (overlap_timer, "REPEATS"): 3,
    (overlap_timer, "SMALL_REPEATS"): 3,
    (overlap_timer, "SMALL_SECONDS"): 0.001,
    (at_once, "ROUND_SECONDS"): 0.001,
    (at_once, "FEWEST_ROUNDS"): 2,
    (at_once, "ENOUGH_STEPS"): 2,
}

Measured = dict[tuple[tuple[int, int], ...], Topology]  # by the ranks that measured

measured: Measured = {}
_told: list[Path] = []


def measure_briefly(known: Measured | None = None, told: Path | None = None) -> None:
    """From now on jobs of this process, and of those forked from it, are measured briefly before they plan.

    Args:
        known: what need not be measured, the same on every rank. told: where rank 0 leaves what it measures, too.
    """
    measured.update(known or {})
    _told[:] = [told] if told else []
    decide.measure = parallelize.measure_links = _brief
    decide.profile_concurrently = _brief_at_once


def _brief(transport: Transport) -> Topology:
    """Every rank has it of the same ranks, or none has: all of them measured together."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks = tuple(transport.share((rank, transport.place.workers_per_node)))
    if ranks not in measured:
        with _shorter():
            found = measure.measure(transport, EFFORT)
        exact = tuple(replace(one, scatter=0.0) for one in found.requests)  # so few rows say nothing of it
        measured[ranks] = replace(found, requests=exact)
        for path in _told if rank == 0 else ():
            draft = path.with_suffix(".draft")  # a rank may be killed as it writes
            draft.write_bytes(pickle.dumps(measured))
            draft.replace(path)
    return measured[ranks]


def learn(told: Path) -> None:
    """What a job that is over has left there."""
    if told.exists():
        measured.update(pickle.loads(told.read_bytes()))


def _brief_at_once(*whose: Any) -> Profile:
    with _shorter():
        return at_once.profile_concurrently(*whose)


@contextmanager
def _shorter() -> Iterator[None]:
    kept = {(file, name): getattr(file, name) for file, name in SHORTER}
    for (file, name), value in SHORTER.items():
        setattr(file, name, value)
    try:
        yield
    finally:
        for (file, name), value in kept.items():
            setattr(file, name, value)
