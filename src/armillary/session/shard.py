"""This worker's share of a loader that gives the same batches on every worker, epoch after epoch.

It is as long as a loader is, and begins anew as one does, so that progress bars and learning-rate schedules find their
length. The loader may shuffle, from one seed on all workers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

from torch.utils.data.distributed import DistributedSampler

__all__ = ["Shard"]

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


def _cut_in(loader: object) -> int:
    """Into how many shares the loader's own sampler cuts the data."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return max((one.num_replicas for one in samplers if isinstance(one, DistributedSampler)), default=1)
