"""The models that are solved: a MADE and masked convolutions, trained on digits, and the loops they are held to."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

LEVELS, SIDE = 4, 28


def digits(side: int) -> Tensor:
    """(images, side * side) of LEVELS levels."""
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None]
    scaled = F.interpolate(images, size=side, mode="bilinear").flatten(1)
    return (scaled / 16 * (LEVELS - 1)).round().long()


def trained(net: nn.Module, side: int, steps: int) -> float:
    """Trains it in float32 and gives the last loss; afterwards the net is in float64."""
    data, optimizer = digits(side), torch.optim.Adam(net.parameters(), 2e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        batch = data[torch.randint(len(data), (64,))]
        loss = F.cross_entropy(net(batch).flatten(0, 1), batch.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.double().eval()
    return float(loss)


class MaskedConvolutions(nn.Module):
    """A small PixelCNN: one 7 x 7 convolution that does not see its own pixel, and 3 x 3 ones that see its features.

    van den Oord et al., Pixel Recurrent Neural Networks, ICML 2016.
    """

    def __init__(self, side: int = SIDE, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.side = side
        sizes = [7, *[3] * layers]
        self.layers = nn.ModuleList(
            nn.Conv2d(1 if not place else width, width, size) for place, size in enumerate(sizes)
        )
        self.head = nn.Conv2d(width, LEVELS, 1)
        self.reach = sum(size // 2 for size in sizes)  # rows above that a pixel sees
        for place, size in enumerate(sizes):
            mask = torch.zeros(size, size)
            mask[: size // 2] = 1
            mask[size // 2, : size // 2 + (place > 0)] = 1
            self.register_buffer(f"mask_{place}", mask, persistent=False)

    def weight(self, place: int) -> Tensor:
        return self.layers[place].weight * getattr(self, f"mask_{place}")

    def forward(self, pixels: Tensor) -> Tensor:
        return self.rows(pixels, 0, self.side)

    def rows(self, pixels: Tensor, first: int, end: int) -> Tensor:
        """(n, pixels of the rows, LEVELS) logits, from the rows that they see alone."""
        top = max(0, first - self.reach)
        seen = pixels.view(len(pixels), 1, self.side, self.side)[:, :, top:end]
        h = seen.to(self.head.weight.dtype) / (LEVELS - 1) * 2 - 1
        for place, layer in enumerate(self.layers):
            h = F.relu(F.conv2d(h, self.weight(place), layer.bias, padding=layer.kernel_size[0] // 2))
        return self.head(h[:, :, first - top :]).flatten(2).transpose(1, 2)

    def outputs_at(self, pixels: Tensor, at: slice) -> Tensor:
        first = at.start // self.side
        logits = self.rows(pixels, first, -(-at.stop // self.side))
        begin = first * self.side
        return logits[:, at.start - begin : at.stop - begin : at.step]

    def incremental(self, samples: int) -> Callable[[int, Tensor | None], Tensor]:
        """The cached loop: every layer at one pixel alone, from what the layer below kept."""
        dtype, side = self.head.weight.dtype, self.side
        weights = [self.weight(place).flatten(1).t().contiguous() for place in range(len(self.layers))]
        kept = []
        for layer in self.layers:
            margin = layer.kernel_size[0] // 2
            kept.append(torch.zeros(samples, layer.in_channels, side + 2 * margin, side + 2 * margin, dtype=dtype))
        head = self.head.weight.flatten(1).t()

        def step(t: int, last: Tensor | None) -> Tensor:
            if last is not None:
                row, column = divmod(t - 1, side)
                kept[0][:, 0, row + 3, column + 3] = last.to(dtype) / (LEVELS - 1) * 2 - 1
            row, column = divmod(t, side)
            h = torch.empty(0)
            for place, layer in enumerate(self.layers):
                size, below = layer.kernel_size[0], kept[place]
                if place:
                    below[:, :, row + size // 2, column + size // 2] = h
                patch = below[:, :, row : row + size, column : column + size].flatten(1)
                h = F.relu(torch.addmm(layer.bias, patch, weights[place]))
            return torch.addmm(self.head.bias, h, head)

        return step


def pixel_by_pixel(net: nn.Module, samples: int, seed: int) -> Tensor:
    """The loop that everybody writes: the whole net for every pixel."""
    unknowns = net.side**2 if isinstance(net, MaskedConvolutions) else net.unknowns
    noise = torch.rand(samples, unknowns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pixels = torch.zeros(samples, unknowns, dtype=torch.long)
    with torch.no_grad():
        for t in range(unknowns):
            sums = net(pixels)[:, t].softmax(-1).cumsum(-1)[:, :-1]
            pixels[:, t] = (sums < noise[:, t, None]).sum(-1)
    return pixels


class TanhCell(nn.Module):
    """h = tanh(x U + h W + b), as one layer of nn.RNN computes it."""

    def __init__(self, inputs: int, width: int, gain: float = 0.5) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(inputs, width) * 0.4)
        self.w = nn.Parameter(torch.randn(width, width) * gain / width**0.5)
        self.b = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(x @ self.u + h @ self.w + self.b)


def looped(cell: nn.Module, xs: Tensor, start: Tensor) -> Tensor:
    h, states = start, []
    for x in xs:
        h = cell(x, h)
        states.append(h)
    return torch.stack(states)
