"""Micro-batches that ranks of one replica hand in: each is given all of them, and all the same."""

from collections.abc import Sequence

from torch import Tensor

from armillary.runtime.agreement import checksum
from armillary.runtime.transport import Transport
from armillary.session.source import leaves
from armillary.session.workload import Batch

__all__ = ["refuse_other_batches"]


def refuse_other_batches(transport: Transport, wanted: range, batches: Sequence[Batch]) -> None:
    """Collective. wanted: the numbers of those that this rank hands in.

    Raises:
        ValueError: ranks that hand in the same numbers were given different data.
    """
    mine = [checksum(leaf) for leaf in leaves(batches) if isinstance(leaf, Tensor)]
    with transport.unrecorded():
        everyones = transport.share((list(wanted), mine))
    first = dict[tuple[int, ...], int]()
    for rank, (numbers, sums) in enumerate(everyones):
        other = first.setdefault(tuple(numbers), rank)
        if sums != everyones[other][1]:
            raise ValueError(
                f"run.step: ranks {other} and {rank} hand in the same micro-batches {numbers} of a step, as they "
                "hold stages of one replica, but were given different data; give every rank the same (run.shard "
                "does)"
            )
