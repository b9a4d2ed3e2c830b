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


def mixed(*names):
    return torch.Generator().manual_seed(random.Random("/".join(map(str, names))).getrandbits(63))


def apart_loops(parts, loader, epochs, settings, learning):
    """Each part but the last learns the codes of its samples, the last one the task; in order."""
    classes, kappa, seed, noise = (settings[name] for name in ("classes", "kappa", "seed", "noise"))
    shapes, h = [], next(iter(loader))[0]
    for part in parts:
        with torch.no_grad():
            part.eval()
            h = part(h)
            part.train()
        shapes.append(h.shape[1:])
    codes = [synthetic_targets(shape.numel(), classes, kappa, seed, p) for p, shape in enumerate(shapes[:-1])]
    for p, part in enumerate(parts):
        optimizer = learning(part.parameters())
        if p and noise is None:
            kept = []
            with torch.no_grad():
                for lower in parts[:p]:
                    lower.eval()
                for x, y in loader:
                    for lower in parts[:p]:
                        x = lower(x)
                    kept.append((x, y))
                for lower in parts[:p]:
                    lower.train()
            values, labels = torch.cat([x for x, _ in kept]), torch.cat([y for _, y in kept])
        for epoch in range(epochs):
            if p and noise is None:
                order = torch.randperm(len(values), generator=mixed(seed, "order", p, epoch))
                pairs = [(values[rows], labels[rows]) for rows in order.split(len(kept[0][0]))]
            else:
                pairs = list(loader)
                for number, (_, y) in enumerate(pairs if p else []):
                    draw = torch.randn(len(y), *shapes[p - 1], generator=mixed(seed, "noise", p, epoch, number))
                    pairs[number] = codes[p - 1][:, y].T.reshape(draw.shape) + noise * kappa * draw, y
            for x, y in pairs:
                optimizer.zero_grad()
                if p < len(parts) - 1:
                    F.mse_loss(part(x).flatten(1), codes[p][:, y].T).backward()
                else:
                    F.cross_entropy(part(x), y).backward()
                optimizer.step()
