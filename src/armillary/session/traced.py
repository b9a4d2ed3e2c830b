"""The last steps of a run on all of its ranks, as one trace."""

import time
from collections.abc import Sequence
from dataclasses import replace

from armillary.facts.trace import Record, Trace
from armillary.runtime.transport import Transport

__all__ = ["MOST_RECORDS", "everyones_trace"]

MOST_RECORDS = 100_000  # a viewer opens so many, of all ranks together


def everyones_trace(mine: Sequence[Record], transport: Transport) -> Trace:
    """Collective. Seconds count from the first record of any rank, by the machines' clocks.

    Args:
        mine: of this rank; of the last steps as many are kept as there is room for, one at least.
    """
    since_epoch = time.time() - time.perf_counter() + transport.origin_seconds
    room = MOST_RECORDS // transport.place.workers
    first = max((record.step for record in mine[:-room]), default=-1) + 1
    first = min(first, max((record.step for record in mine), default=0))
    placed = [replace(r, start_seconds=since_epoch + r.start_seconds) for r in mine if r.step >= first]
    everyones = transport.share(sorted(placed, key=lambda record: record.start_seconds))
    origin = min((records[0].start_seconds for records in everyones if records), default=0.0)
    return Trace(
        tuple(
            tuple(replace(record, start_seconds=record.start_seconds - origin) for record in records)
            for records in everyones
        )
    )
