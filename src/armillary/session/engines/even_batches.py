"""As many batches on every rank: one whose data have run out repeats its last batch, which counts for nothing.

Where weights meet, a rank without data would count all the same, and to ask every step who has some would make ranks
wait that are meant to train alone. So there all must have as many, which is asked once.
"""

from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any, TypeVar

from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.runtime.hybrid.executor import Executor
from armillary.session.first_batches import FirstBatches
from armillary.session.source import LeftOver, Source, leaves

__all__ = ["even_batches"]

Batch = TypeVar("Batch")


def even_batches(
    at_work: Callable[[], Executor], loader: Iterable[Batch], first: FirstBatches, left: LeftOver
) -> Iterator[Batch]:
    """The loader's batches, as many as the longest rank has; see `Run.batches`.

    Args:
        at_work: who carries the plan out now; a run may move to another plan in the middle of a loop.
        first: is shown each batch of this rank's own.
        left: of loops before this one.

    Raises:
        ValueError: this rank has no batch at all; there is nothing it could repeat. Or weights meet, and ranks have
            different numbers of batches, or do not know how many.
    """
    executor = at_work()
    if meeting := [one for one in executor.units if isinstance(one, DenseUnit) and one.exchange.carries == "weights"]:
        _refuse_uneven(executor, loader, meeting[0].name)
        if not executor.tables:
            first.open(loader)
            for given in loader:
                first.take(given)
                yield given
            return
    prefetch = executor.prefetch
    first.open(loader)
    source = Source(loader, prefetch.depth if first.is_plain or not first.only_plain else 0, left)
    batch: Batch | None = source.take()
    _refuse_none(executor, batch is not None)
    assert batch is not None
    last = batch
    prefetch.begin_loop()
    try:
        while True:
            last = batch if batch is not None else last
            with_data = _first_of(at_work(), batch is not None)
            if with_data is None:
                return
            at_work().with_data = with_data
            at_work().stand_by(batch is None)
            if executor is at_work():  # a plan that came since prefetches from the next loop on
                prefetch.begin_batch(partial(leaves, last), lambda: leaves(source.glance()))
            if batch is not None:
                first.take(batch)
            yield last
            batch = source.take() if batch is not None else None
    finally:
        source.leave()
        prefetch.end_loop()
        at_work().stand_by(False)
        at_work().with_data = 0


def _refuse_uneven(executor: Executor, loader: Iterable[Any], group: str) -> None:
    """Collective, when a loop begins.

    Raises:
        ValueError: ranks have different numbers of batches, or one does not know. On every rank.
    """
    with executor.transport.within("batches"), executor.transport.unrecorded():
        everyones = executor.transport.share(len(loader) if isinstance(loader, Sized) else None)
    if len(set(everyones)) > 1 or None in everyones:
        told = ", ".join(f"rank {rank}: {'unknown' if n is None else n}" for rank, n in enumerate(everyones))
        raise ValueError(
            f"run.batches: ranks have different numbers of batches, or do not know them ({told}), and the weights of "
            f"{group} meet, where each rank counts alike; give every rank as many, by a loader with a length"
        )


def _refuse_none(executor: Executor, mine: bool) -> None:
    """Collective, when a loop begins; ranks that are still evaluating are served meanwhile.

    Raises:
        ValueError: a rank has no batch. On every rank.
    """
    rank, transport = executor.transport.place.rank, executor.transport
    with transport.within("batches"), transport.unrecorded():
        executor.look_ups.serve_until("idle")
        most = int(transport.agree_largest([0.0 if mine else rank + 1.0])[0])
    if most:
        raise ValueError(f"run.batches: rank {most - 1 if mine else rank} has no batch; give every rank at least one")


def _first_of(executor: Executor, mine: bool) -> int | None:
    """The first rank of which it is true; ranks that are still evaluating are served meanwhile."""
    look_ups, place = executor.look_ups, executor.transport.place
    with executor.transport.within("batches"):
        if not look_ups.pulled:
            behind = int(executor.transport.agree_largest([float(mine * (place.workers - place.rank))])[0])
            return place.workers - behind if behind else None
        look_ups.serve_until("idle", float(mine))
        executor.prefetch.seal()
        return next((rank for rank, weight in enumerate(look_ups.weights) if weight), None)
