"""The random numbers of one stage of one micro-batch of one step, whoever computes it, and when.

Staggered workers run in another order than one process would, and a stage may be computed twice (recomputation).
Seeding by place instead of by process makes dropout the same in every mode and in the reference.

The one layout of what crosses a cut between stages: values and their gradients, row by row, in aligned memory.

Kernels add up in the order in which numbers lie in memory, so the same values in another layout may round otherwise.
Autograd gives a gradient the strides of the kernel that made it; a leaf's `.grad` has the leaf's; what comes over the
wire lies as it was received. Which of them round apart hangs on the processor. So every cut has one layout, whoever
carries it: the one that a message has anyway, since only that is the same on both sides without being told.

Nothing crosses a cut where each worker runs the whole model (rings).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.schedules.schedule import Cell

__all__ = ["RandomStream", "place_seed", "plain", "seed_from_step", "seed_streams", "seeded"]

ALIGNMENT_BYTES = 64  # of what torch's allocator hands out on a host; matrix kernels may round otherwise at another one


def plain(tensor: Tensor) -> Tensor:
    """The same values, the last dimension running fastest; a copy only if they lie otherwise. Sparse ones stay."""
    if tensor.layout != torch.strided:
        return tensor
    rows = tensor.contiguous().view(-1).view(tensor.shape)  # contiguous() alone keeps odd strides of size 1
    return rows if rows.data_ptr() % ALIGNMENT_BYTES == 0 else rows.clone()


_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15


def place_seed(seed: int, place: Cell) -> int:
    """A seed of 63 bits from the run's `seed` and (step, micro_batch, stage), mixed so that neighbours differ.

    Source: SplitMix64 (Steele, Lea, Flood, 2014), one round per number.
    """
    mixed = seed & _MASK
    for number in place:
        mixed = (mixed + (number + 1) * _STRIDE) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1


def seed_from_step(seed: int, first: int) -> int:
    """The seed of a run that counts its steps from 0 and goes on where step `first` of a run with `seed` would have.

    place_seed(seed_from_step(seed, first), (t, m, j)) == place_seed(seed, (first + t, m, j)).
    """
    return (seed + first * _STRIDE) & _MASK


def seed_streams(seed: int, device: torch.device) -> None:
    """Seeds the host's stream, and `device`'s if it has one, as torch.manual_seed would.

    Not by torch.manual_seed: for every kind of accelerator that is not in use it formats the call stack and keeps it
    (torch 2.13), which costs milliseconds a call and memory that never comes back.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        with accelerator.device(device):
            accelerator.manual_seed(seed)


class RandomStream(NamedTuple):
    """The random numbers of one place. seed: the run's."""

    seed: int
    place: Cell


@contextmanager
def seeded(seed: int, place: Cell, device: torch.device) -> Iterator[None]:
    """Draws from the place's stream inside, on the host and on `device`; the streams outside go on as they were."""
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        seed_streams(place_seed(seed, place), device)
        yield
