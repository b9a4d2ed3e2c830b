"""Random numbers inside a region: another seed for each distinct piece of an activation, the same on its copies.

Each draw takes one number of the processor's random stream, which all ranks of a replica have alike; so a seed of the
user's makes the run repeatable, and activation checkpointing, which puts that stream back, drops the same again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["base_seed", "seeded"]

ODD = 0x9E3779B97F4A7C15  # spreads neighbouring pieces (Steele et al., SplitMix, 2014)


def base_seed() -> int:
    return int(torch.randint(1 << 62, ()))


@contextmanager
def seeded(base: int, piece: int, device: torch.device) -> Iterator[None]:
    """What is drawn inside belongs to this piece; the stream outside goes on as if nothing had been drawn."""
    seed, kind = (base + (piece + 1) * ODD) % (1 << 63), device.type
    if kind == "cpu":
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng([device], device_type=kind):
            getattr(torch, kind).manual_seed(seed)
            yield
