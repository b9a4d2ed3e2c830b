"""Measures the links of a job as it starts, and says how far it is: a start of some seconds in silence looks stuck."""

import sys

from armillary.facts.topology import Topology
from armillary.runtime.measure import measure
from armillary.runtime.transport import Transport

__all__ = ["measure_links"]


def measure_links(transport: Transport) -> Topology:
    """Collective; every rank gets the same. Rank 0 writes to stderr: on a terminal one line that changes, else one line
    each."""
    ends = "\r" if sys.stderr.isatty() else "\n"

    def says(number: int, count: int) -> None:
        if transport.place.rank == 0:
            last = "\n" if number == count else ends
            print(f"armillary: measuring links {number} of {count}", end=last, file=sys.stderr, flush=True)

    return measure(transport, begins=says)
