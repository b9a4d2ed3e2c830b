"""The batches of a loader, of which a few may be drawn before their turn, so that prefetch knows what comes.

Drawing early must change nothing, and a loader can be anything. So the first draws are made at their turn and watched.
A loader that moves a global random state, or writes into the batch it gave before, is never drawn early. Nor is one
that tells its place (`state_dict`): a loop that saved it would skip a batch after a resume.

Prefetch may be taken by price over torch's own loader of a map-style dataset (`is_plain_loader`). A user's own
iterable, sampler or subclass may look at what the loop did between two batches, which no watch sees.

A `Shard` is a worker's share of a loader that gives the same batches on every worker. It has the length of its epochs,
so that progress bars and learning-rate schedules find it. The loader may shuffle, from one seed on all workers.
"""

import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

__all__ = ["WATCHED_DRAWS", "Dealt", "LeftOver", "Shard", "Source", "is_plain_loader", "leaves"]

Item = TypeVar("Item")


class Shard(Generic[Item]):
    """Every `workers`-th batch, beginning with the one numbered `worker`.

    Each worker still loads all batches; where loading is costly, use torch's DistributedSampler with
    num_replicas=run.workers, rank=run.rank, and no shard.

    Args:
        drop_last: whether an incomplete last round is left out, so that every worker has as many batches. If not, every
            batch is some worker's, and some have one more.
        watch: is told of every pass over the loader: it returns what is shown each round, the batches of all workers.

    Raises:
        ValueError: there is no such worker, or the loader's sampler cuts the data already; (in a pass) the loader gives
            fewer batches than there are workers.
    """

    def __init__(
        self,
        loader: Iterable[Item],
        worker: int,
        workers: int,
        drop_last: bool = True,
        watch: Callable[[], Callable[[Sequence[Item]], None]] | None = None,
    ) -> None:
        if not 0 <= worker < workers:
            raise ValueError(f"shard: worker {worker} of {workers}; workers are numbered from 0")
        if (cuts := _cut_in(loader)) > 1:
            raise ValueError(
                f"run.shard: the loader's DistributedSampler gives each of {cuts} ranks its own share already, so only "
                f"one batch in {workers} of that would be trained on; loop over the loader itself"
            )
        self.loader, self.worker, self.workers, self.drop_last = loader, worker, workers, drop_last
        self._watch = watch

    def __iter__(self) -> Iterator[Item]:
        show = self._watch() if self._watch is not None and self.workers > 1 else None
        source, is_any = iter(self.loader), False
        while together := list(islice(source, self.workers)):
            if self.drop_last and len(together) < self.workers:
                if not is_any:
                    raise ValueError(
                        f"run.shard: the loader gave {len(together)} batches for {self.workers} workers, so none has "
                        "any; take smaller batches, or run.shard(loader, drop_last=False) to evaluate"
                    )
                return
            is_any = True
            if show is not None:
                show(together)
            if self.worker < len(together):
                yield together[self.worker]

    def __len__(self) -> int:
        """
        Raises:
            TypeError: the loader has no length.
        """
        whole, rest = divmod(len(self.loader), self.workers)  # type: ignore[arg-type]
        return whole + (not self.drop_last and self.worker < rest)


class Dealt(Generic[Item]):
    """Batches of a loader that gives the same on every rank, each dealt to the rank that asks first: a slow rank gets
    fewer. Every rank draws all of them. Anew in every epoch.

    Args:
        deal: begins an epoch; what it returns gives the number of this rank's next batch.
    """

    def __init__(self, loader: Iterable[Item], deal: Callable[[], Callable[[], int]]) -> None:
        if (cuts := _cut_in(loader)) > 1:
            raise ValueError(
                f"run.shard: the loader's DistributedSampler gives each of {cuts} ranks its own share already; loop "
                "over the loader itself, or give one that has all batches"
            )
        self.loader, self._deal = loader, deal

    def __iter__(self) -> Iterator[Item]:
        source, ask = enumerate(self.loader), self._deal()
        while True:
            wanted = ask()
            found = next((batch for number, batch in source if number == wanted), None)
            if found is None:
                return
            yield found


def _cut_in(loader: object) -> int:
    """Into how many shares the loader's own sampler cuts the data."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return max((one.num_replicas for one in samplers if isinstance(one, DistributedSampler)), default=1)


def is_plain_loader(loader: object) -> bool:
    """A DataLoader, or this worker's share of one, with a map-style dataset and samplers of torch's."""
    if isinstance(loader, Shard):
        loader = loader.loader
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    samplers: list[object] = [loader.sampler, loader.batch_sampler]
    if isinstance(loader.batch_sampler, BatchSampler):
        samplers.append(loader.batch_sampler.sampler)
    return all(one is None or type(one).__module__.startswith("torch.utils.data.") for one in samplers)


Batch = TypeVar("Batch")

WATCHED_DRAWS = 2  # besides the first, which opens the loader


class _Drawn(NamedTuple):
    """Before its turn. batches: the first ones first, None is the end. error: that the draw after them met."""

    batches: deque[Any]
    error: BaseException | None = None


class LeftOver:
    """What was drawn early of streams, by loops that were left: the next loop over a stream begins with it.

    A stream is a loader that is its own iterator; any other begins anew.
    """

    def __init__(self) -> None:
        self._drawn = WeakKeyDictionary[Any, _Drawn]()
        self._last: tuple[Any, _Drawn] | None = None  # of a stream that cannot be known weakly

    def keep(self, stream: object, drawn: _Drawn) -> None:
        try:
            self._drawn[stream] = drawn
        except TypeError:
            self._last = (stream, drawn)

    def take(self, stream: object) -> _Drawn:
        if self._last is not None and self._last[0] is stream:
            (_, drawn), self._last = self._last, None
            return drawn
        try:
            return self._drawn.pop(stream, _Drawn(deque()))
        except TypeError:
            return _Drawn(deque())


class Source(Generic[Batch]):
    """depth: how many batches may be drawn before their turn. Not seen by the watch: a loader that depends on what the
    loop does between two batches."""

    def __init__(self, loader: Iterable[Batch], depth: int, left: LeftOver):
        self.source, self._left = iter(loader), left
        self.is_stream = self.source is loader
        self.depth = 0 if hasattr(loader, "state_dict") else depth
        self.drawn = 0
        self.given: deque[Batch | None] = deque(maxlen=depth or 1)  # to the loop, the last ones
        drawn = left.take(self.source) if self.is_stream else _Drawn(deque())
        self.early: deque[Batch | None] = drawn.batches  # drawn before their turn; None is the end
        self.error = drawn.error  # that an early draw met; raised at its turn

    def leave(self) -> None:
        """The loop is over, or left."""
        if self.is_stream and (self.early or self.error is not None):
            self._left.keep(self.source, _Drawn(self.early, self.error))

    def take(self) -> Batch | None:
        """The next batch, None at the end.

        Raises:
            Whatever the loader raises.
        """
        if self.early:
            batch = self.early.popleft()
        elif self.error is not None:
            raise self.error
        elif self.depth and 0 < self.drawn <= WATCHED_DRAWS:
            batch = self._watched()
        else:
            batch = next(self.source, None)
        self.drawn += 1
        self.given.append(batch)
        return batch

    def glance(self) -> Batch | None:
        """The batch `depth` after the one taken last; None where there is none, or none is drawn before its turn.

        Raises:
            RuntimeError: a draw wrote into a batch that was given before.
        """
        if self.drawn <= WATCHED_DRAWS:
            return None
        while len(self.early) < self.depth and self.error is None and self._goes_on():
            self._draw_early()
        return self.early[-1] if 0 < self.depth == len(self.early) else None

    def _goes_on(self) -> bool:
        return (self.early or self.given)[-1] is not None

    def _draw_early(self) -> None:
        given = [leaf for leaf in leaves([self.given[-1], *self.early]) if not leaf.is_inference()]
        before, versions = _random_states(), [leaf._version for leaf in given]
        try:
            batch = next(self.source, None)
        except Exception as error:
            self.error = error
            return
        self.early.append(batch)
        if versions != [leaf._version for leaf in given]:
            raise RuntimeError(
                "run.batches: the loader wrote into a batch it had given before, which the loop still needs; give "
                "fresh tensors, or set prefetch='none' in the plan's groups"
            )
        if not before.are(_random_states()):
            self.depth, number = 0, self.drawn + len(self.early) - 1
            warnings.warn(
                f"run.batches: the loader drew from a global random state for its batch {number}, "
                "before the loop needed it, so random numbers may fall otherwise than without prefetch; no more are "
                "drawn ahead. Give the loader a generator of its own",
                stacklevel=4,
            )

    def _watched(self) -> Batch | None:
        """A draw at its turn, that may show that no draw can be made before its turn."""
        held = leaves(list(self.given))
        before, copies = _random_states(), [leaf.clone() for leaf in held]
        batch = next(self.source, None)
        is_quiet = before.are(_random_states())
        if not is_quiet or not all(torch.equal(leaf, copy) for leaf, copy in zip(held, copies, strict=True)):
            self.depth = 0
        return batch


def leaves(batch: Any) -> list[Tensor]:
    """The tensors in a batch, in order, whatever tuples, lists and dictionaries hold them."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves(value)]
    if isinstance(batch, list | tuple):
        return [leaf for value in batch for leaf in leaves(value)]
    return []


class _RandomStates(NamedTuple):
    """Of the generators that everybody shares."""

    torch: Tensor
    python: Any
    numpy: Any

    def are(self, other: "_RandomStates") -> bool:
        return (
            torch.equal(self.torch, other.torch)
            and self.python == other.python
            and self.numpy["pos"] == other.numpy["pos"]
            and self.numpy["key"].tobytes() == other.numpy["key"].tobytes()
        )


def _random_states() -> _RandomStates:
    state = np.random.get_state(legacy=False)["state"]
    return _RandomStates(torch.default_generator.get_state(), random.getstate(), state)
