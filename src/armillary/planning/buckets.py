"""Which dense parameters travel together: buckets in the order in which gradients arrive.

A bucket leaves when its last gradient has arrived, so small buckets leave early and hide behind the backward pass,
and large ones pay latency less often. On gloo over a 1 Gbit/s link, buckets of 2 MB hid half of what could be hidden,
DDP's 25 MB a sixteenth (two workers, 40 MB of gradients); nccl keeps DDP's sizes, whose first bucket is small so that
the link starts early.

Source: Li et al., PyTorch Distributed (VLDB 2020), gradient bucketing.
"""

from collections.abc import Iterable
from typing import NamedTuple

from armillary.facts.parameter import ParameterFact

__all__ = ["BucketLimits", "arrival_of", "buckets", "default_limits"]

MIB = 1 << 20


class BucketLimits(NamedTuple):
    """A bucket is closed once it holds this many bytes: the first of each dtype, and the others."""

    first_bytes: int
    bytes: int


def default_limits(backend: str) -> BucketLimits:
    return BucketLimits(MIB, 25 * MIB) if backend == "nccl" else BucketLimits(2 * MIB, 2 * MIB)


def arrival_of(fact: ParameterFact) -> float:
    """Place in the order of arrival; infinite without a gradient."""
    return float("inf") if fact.arrival is None else float(fact.arrival)


def buckets(facts: Iterable[ParameterFact], limits: BucketLimits) -> list[tuple[ParameterFact, ...]]:
    """Parameters of one dtype per bucket, in order of arrival; every bucket but a last one reaches its limit.

    Parameters whose gradient was never seen come in buckets of their own at the end: they would hold up any other.
    Buckets stand in the order in which they become complete.
    """
    if min(limits) < 1:
        raise ValueError(f"buckets: want at least 1 byte a bucket, got {limits.first_bytes} and {limits.bytes}")
    closed: list[tuple[ParameterFact, ...]] = []
    open_: dict[tuple[str, bool], list[ParameterFact]] = {}
    begun: set[tuple[str, bool]] = set()
    for fact in sorted(facts, key=arrival_of):
        kind = (fact.dtype, fact.arrival is None)
        bucket = open_.setdefault(kind, [])
        bucket.append(fact)
        if sum(member.bytes for member in bucket) >= (limits.bytes if kind in begun else limits.first_bytes):
            begun.add(kind)
            closed.append(tuple(open_.pop(kind)))
    closed += [tuple(bucket) for bucket in open_.values()]
    return sorted(closed, key=lambda bucket: max(arrival_of(fact) for fact in bucket))
