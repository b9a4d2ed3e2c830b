"""As many batches on every rank: one whose data have run out repeats its last batch, which counts for nothing."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from armillary.runtime.hybrid.executor import Executor
from armillary.session.source import Source, leaves

__all__ = ["even_batches"]

Batch = TypeVar("Batch")


def even_batches(
    at_work: Callable[[], Executor], loader: Iterable[Batch], show: Callable[[Batch], None]
) -> Iterator[Batch]:
    """The loader's batches, as many as the longest rank has; see `Run.batches`.

    Args:
        at_work: who carries the plan out now; a run may move to another plan in the middle of a loop.
        show: is shown each batch of this rank's own.

    Raises:
        ValueError: this rank has no batch at all; there is nothing it could repeat.
    """
    executor = at_work()
    prefetch = executor.prefetch
    source = Source(loader, prefetch.depth)
    batch: Batch | None = source.take()
    if batch is None:
        rank = executor.transport.place.rank
        raise ValueError(f"run.batches: rank {rank} has no batch; give every rank at least one")
    last = batch
    prefetch.begin_loop()
    try:
        while True:
            last = batch if batch is not None else last
            if not _is_any(at_work(), batch is not None):
                return
            at_work().stand_by(batch is None)
            if executor is at_work():  # a plan that came since prefetches from the next loop on
                prefetch.begin_batch(partial(leaves, last), lambda: leaves(source.glance()))
            if batch is not None:
                show(batch)
            yield last
            batch = source.take() if batch is not None else None
    finally:
        prefetch.end_loop()
        at_work().stand_by(False)


def _is_any(executor: Executor, mine: bool) -> bool:
    """Whether it is true of any rank; ranks that are still evaluating are served meanwhile."""
    look_ups = executor.look_ups
    with executor.transport.within("batches"):
        if not look_ups.pulled:
            return bool(executor.transport.agree_largest([float(mine)])[0])
        look_ups.serve_until("idle", float(mine))
        executor.prefetch.seal()
        return any(look_ups.weights)
