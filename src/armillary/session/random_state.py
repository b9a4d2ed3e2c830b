"""The random state of a script, which planning draws from and leaves as it found it.

A model's dropout and a loader's shuffling draw from generators that the whole script shares. A training that follows
must draw what it would have drawn without a plan.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["unmoved"]


@contextmanager
def unmoved(loader: Any = None) -> Iterator[None]:
    """Afterwards the generators of torch, numpy and Python are as they were, and those that a DataLoader was given.

    Args:
        loader: what is drawn from; an iterator cannot be put back.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    own = {id(one): (one, one.get_state()) for one in _generators(loader)}
    host, arrays, plain = torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()
    on_device = {device: torch.cuda.get_rng_state(device) for device in devices}
    try:
        yield
    finally:
        torch.set_rng_state(host)
        for device, state in on_device.items():
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(arrays)
        random.setstate(plain)
        for generator, state in own.values():
            generator.set_state(state)


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Of a loader, and of the samplers in it."""
    while loader is not None:
        if isinstance(there := getattr(loader, "generator", None), torch.Generator):
            yield there
        sampler = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
        loader = sampler if sampler is not loader else None
