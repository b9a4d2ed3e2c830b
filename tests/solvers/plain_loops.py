"""References in plain loops, and the systems that tests solve. Nothing here comes from the library."""

import torch

METHODS = [
    ("in_order", {}),
    ("jacobi", {}),
    ("gs_jacobi", {"window": 1}),
    ("gs_jacobi", {"window": 5}),
    ("gs_jacobi", {"window": 100}),
    ("jacobi_gs", {"block": 1}),
    ("jacobi_gs", {"block": 4}),
    ("jacobi_gs", {"block": 100}),
]
NAMES = [f"{name}{tuple(options.values()) or ''}" for name, options in METHODS]


def one_by_one(update, start):
    """Every unknown from those before it, one after the other."""
    states = start.clone()
    for t in range(len(states)):
        states[t] = update(states.clone(), slice(t, t + 1))[0]
    return states


def looped(cell, xs, start):
    h, states = start, []
    for x in xs:
        h = cell(x, h)
        states.append(h)
    return torch.stack(states) if states else xs.new_zeros(0, *start.shape)


def integers(unknowns, seed=0, batch=3):
    """Each unknown is a number below 7 that hangs on up to four before it, and on a batch of constants."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 7, (unknowns, unknowns), generator=draw).tril(-1).triu(-4)
    weights *= torch.randint(0, 2, weights.shape, generator=draw)
    more = torch.randint(0, 7, (unknowns, batch), generator=draw)

    def update(states, at):
        return (weights[at] @ states + more[at]) % 7

    return update, torch.zeros(unknowns, batch, dtype=torch.long)


def reals(unknowns, seed=0):
    """Each unknown is a vector of three, by a tanh of all before it."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(unknowns, unknowns, generator=draw, dtype=torch.float64).tril(-1) / max(unknowns, 1) ** 0.5
    more = torch.randn(unknowns, 3, generator=draw, dtype=torch.float64)

    def update(states, at):
        return torch.tanh(weights[at] @ states + more[at])

    return update, torch.zeros(unknowns, 3, dtype=torch.float64)


class Cell(torch.nn.Module):
    """A tanh cell; `gain` is the size of its recurrent matrix."""

    def __init__(self, inputs, width, gain=0.5, seed=0):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.u = torch.nn.Parameter(torch.randn(inputs, width, generator=draw, dtype=torch.float64))
        matrix = torch.randn(width, width, generator=draw, dtype=torch.float64)
        self.w = torch.nn.Parameter(gain * matrix / width**0.5)
        self.b = torch.nn.Parameter(0.1 * torch.randn(width, generator=draw, dtype=torch.float64))

    def forward(self, x, h):
        return torch.tanh(x @ self.u + h @ self.w + self.b)


def inputs(steps, *shape, seed=1):
    return torch.randn(steps, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(states, weights, wanted):
    """Of a weighted sum of all states."""
    return torch.autograd.grad((states * weights).sum(), wanted)


def sampled(net, noise, draw):
    """Pixel by pixel: noise (samples, unknowns, ...), the whole net for every pixel."""
    pixels = torch.zeros(noise.shape[:2], dtype=torch.long)
    with torch.no_grad():
        for t in range(noise.shape[1]):
            pixels[:, t] = draw(net(pixels)[:, t], noise[:, t])
    return pixels


def categorical(logits, noise):
    """How many of the sums of probabilities lie below the noise."""
    chances = logits.exp() / logits.exp().sum(-1, keepdim=True)
    found = torch.zeros_like(noise, dtype=torch.long)
    below = torch.zeros_like(noise)
    for level in range(logits.shape[-1] - 1):
        below = below + chances[..., level]
        found += below < noise
    return found
