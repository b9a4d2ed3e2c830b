"""Whether a loader is torch's own over data that are there: then a batch does not hang on when it is drawn.

Over such a loader prefetch may be taken by price. A user's own iterable, sampler or subclass may look at what the loop
did between two batches, which no watch sees; over those prefetch has to be asked for.
"""

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from armillary.session.shard import Shard

__all__ = ["is_plain_loader"]


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
