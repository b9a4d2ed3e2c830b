"""A network of N hosts on one machine: namespaces, a bridge, token buckets; the kernel counts."""

from benchmarks.netlab.counters import Counted, counted_bytes
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.namespaces import LabUnavailable, sweep
from benchmarks.netlab.ranks import Finished, RankFailed

__all__ = ["Counted", "Finished", "Lab", "LabUnavailable", "RankFailed", "counted_bytes", "sweep"]
