"""What a PyTorch user has today: the modes that ours are compared with.

A mode is a function that builds a model and returns its `step()`: one batch, one update, the loss. Every
mode starts from the same parameters and sees the same batches, so only the exchange differs.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.hybrid.model import Sizes, batches, seeded_model

Step = Callable[[], float]
LEARNING_RATE = 0.1


def peers(sizes: Sizes) -> Mapping[str, Callable[[], Step]]:
    """The modes of this file by name, each ready to be built. `ddp_dense` needs 3 times the tables' memory."""
    return {
        "compute_only": partial(compute_only, sizes),
        "ddp_dense": partial(ddp_dense, sizes),
        "ddp_sparse": partial(ddp_sparse, sizes),
    }


def compute_only(sizes: Sizes) -> Step:
    """Every rank trains for itself: the time no exchange can beat. Not training in any useful sense."""
    return sgd_step(seeded_model(sizes, sparse=True), sizes)


def ddp_dense(sizes: Sizes) -> Step:
    """DistributedDataParallel with its defaults: whole tables are all-reduced."""
    return sgd_step(_parallel(seeded_model(sizes, sparse=False)), sizes)


def ddp_sparse(sizes: Sizes) -> Step:
    """The same with `nn.Embedding(sparse=True)`: every rank gathers the rows all the others read."""
    return sgd_step(_parallel(seeded_model(sizes, sparse=True)), sizes)


def sgd_step(model: nn.Module, sizes: Sizes) -> Step:
    """A step of plain SGD on this rank's next batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    return partial(train, model, optimizer, batches(sizes, dist.get_rank()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, incoming: Iterator[tuple[Tensor, Tensor]]) -> float:
    """One step: the training loop of all modes. Returns this rank's loss before the update."""
    optimizer.zero_grad()
    loss = model(*next(incoming))
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _parallel(model: nn.Module) -> DistributedDataParallel:
    # init_sync would broadcast tables that are equal by their seed: minutes on a slow link, nothing in training.
    return DistributedDataParallel(model, init_sync=False)
