"""Local losses and parts on synthetic labels as plain loops in one process; nothing of the library is imported here.

`parts` are modules that follow one another, `heads` one for each but the last.
"""

import random

import torch
import torch.nn.functional as F


def local_step(parts, heads, batch, decoders=None, shares=None, is_cut=True):
    """Backward of the sum of all losses, each part cut off from the one below; the sum."""
    h, total = batch[0], 0.0
    for j, part in enumerate(parts):
        h = part(h.detach() if is_cut else h)
        if j == len(parts) - 1:
            own = F.cross_entropy(h, batch[1])
        else:
            own = F.cross_entropy(heads[j](h), batch[1])
            if decoders is not None:
                rebuilt = decoders[j](F.interpolate(h, batch[0].shape[-2:], mode="bilinear", align_corners=True))
                own = shares[j][0] * F.binary_cross_entropy(rebuilt, batch[0]) + shares[j][1] * own
        total = total + own
    total.backward()
    return total.detach()


def windows_step(parts, heads, batch, reach):
    """Every loss crosses its own part and reach - 1 below, each window run anew."""
    with torch.no_grad():
        inputs = [batch[0]]
        for part in parts[:-1]:
            inputs.append(part(inputs[-1]))
    total = 0.0
    for j in range(len(parts)):
        first = max(0, j - reach + 1)
        h = inputs[first]
        for part in parts[first : j + 1]:
            h = part(h)
        total = total + F.cross_entropy(h if j == len(parts) - 1 else heads[j](h), batch[1])
    total.backward()
    return total.detach()


def synthetic_targets(neurons, classes, kappa, seed, cut):
    draw = torch.Generator().manual_seed(random.Random(f"{seed}/{cut}").getrandbits(63))
    return kappa * torch.rand(neurons, classes, generator=draw)
