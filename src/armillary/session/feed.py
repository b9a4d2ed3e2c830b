"""Which batches a worker draws: its own share of the data, which a workload cuts itself."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from armillary.session.workload import Batch, Workload

__all__ = ["Feed", "device_of", "opened", "stream_seed", "together"]


def stream_seed(seed: int, step: int, worker: int) -> int:
    """The seed of a worker's random stream at a step, so that a resumed or a replayed step draws what it drew."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {worker}".encode()).digest()[:7])


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes; the host if nothing in it says."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


class Feed:
    """A worker's training batches, epoch after epoch. `epoch` and `drawn` say where it stands.

    Raises:
        ValueError: (at the first draw) the worker has no batch at all.
    """

    def __init__(self, workload: Workload, place: tuple[int, int], seed: int, epoch: int = 0, drawn: int = 0):
        self.workload, self.place, self.seed = workload, place, seed
        self.epoch, self.drawn = epoch, drawn
        self.source = self._open()
        for _ in islice(self.source, drawn):  # where a resumed run left off
            pass

    def _open(self) -> Iterator[Batch]:
        return self.workload.batches("train", *self.place, self.seed + self.epoch)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        for batch in self.source:
            self.drawn += 1
            return batch
        if not self.drawn:
            worker, workers = self.place
            raise ValueError(
                f"rank {worker}: {self.workload.name} has no training batch for worker {worker} of {workers}; "
                "take a smaller batch_size, fewer workers or more data"
            )
        self.epoch, self.drawn = self.epoch + 1, 0
        self.source = self._open()
        return next(self)

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps; JSON-able."""
        return {"epoch": self.epoch, "examples": self.drawn * self._together}

    @property
    def _together(self) -> int:
        """Examples that all workers draw at once."""
        return self.workload.batch_size * self.place[1]

    @classmethod
    def resume(cls, workload: Workload, place: tuple[int, int], seed: int, state: Mapping[str, int]) -> "Feed":
        """Goes on where `state` left off; with other batches or workers, after as many examples (rounded down)."""
        drawn = state["examples"] // (workload.batch_size * place[1])
        return cls(workload, place, seed, state["epoch"], drawn)


def opened(
    workload: Workload, mine: Sequence[int], count: int, seed: int, left: Mapping[str, Any] | None = None
) -> list[Feed]:
    """A feed for each micro-batch that this rank hands in, of `count` in a step.

    Args:
        left: the place that `together` gave to an earlier part of the training, on this rank or another.
    """
    if left is None:
        return [Feed(workload, (number, count), seed) for number in mine]
    states = left.get("feeds", [])
    if len(states) != len(mine):
        states = [left["feed"]] * len(mine)
    return [Feed.resume(workload, (number, count), seed, state) for number, state in zip(mine, states, strict=True)]


def together(feeds: Sequence[Feed]) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
    """A step's batches, one of each feed, with the place in the data after them. A loop that prefetches holds a batch
    while the feed has drawn others; what it saves is the place of the one it holds."""
    while True:
        batches = [next(feed) for feed in feeds]
        states = [feed.state() for feed in feeds]
        yield batches, {"feed": states[0], **({"feeds": states} if len(states) > 1 else {})}
