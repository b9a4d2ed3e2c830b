"""Which processor a rank keeps to, and the kernel's policy for it: alike for every rank, whatever program it runs.

Ranks that outnumber their processors push one another aside, and gloo's event loop asks the kernel again and again for
a connection whose sender was pushed aside. Under the policy for batch jobs a wake-up pushes nobody aside. Where as many
ranks come on each processor, each keeps to one, and its loop cannot spin beside the sender it waits for. Ranks that do
not come out even keep to none, and nothing is done where every rank has a processor.

The lab does this before a rank's program begins, since peers gain by it as ours do. Ranks are held to have one thread
each, as `OMP_NUM_THREADS=1` gives them.

Source: sched(7), SCHED_BATCH; taskset(1) and chrt(1) of util-linux; github.com/pytorch/gloo/issues/246 (the spin).
"""

import os
import shutil
from collections.abc import Sequence

from benchmarks.netlab.namespaces import LabUnavailable

__all__ = ["prefix", "usable_processors"]


def usable_processors() -> tuple[int, ...]:
    """Those of this process, which its ranks share.

    Raises:
        LabUnavailable: no util-linux: ranks could not be kept to any.
    """
    missing = [tool for tool in ("taskset", "chrt") if shutil.which(tool) is None]
    if missing:
        raise LabUnavailable(
            f"netlab: pinning needs util-linux, found no {' and no '.join(missing)} on PATH; install it"
        )
    return tuple(sorted(os.sched_getaffinity(0)))


def prefix(rank: int, ranks: int, processors: Sequence[int]) -> tuple[str, ...]:
    """The words in front of this rank's command; none where `ranks` do not outnumber the processors."""
    if ranks <= len(processors):
        return ()
    batch = ("chrt", "--batch", "0")
    if ranks % len(processors):
        return batch
    return ("taskset", "--cpu-list", str(processors[rank % len(processors)]), *batch)
