"""ResNet-18 for small images, as a sequence of its parts.

A sequence rather than one module with a long `forward`: whoever cuts it into stages need not read it.

Source: He et al., CVPR 2016, with the stem usual for 32 x 32 images (one 3 x 3 convolution, no pooling).
"""

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["NORMS", "Residual", "resnet18"]

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(max(1, channels // 16), channels),
}
BLOCKS = ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1))  # widths in units of the first, strides


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int, norm: str) -> None:
        super().__init__()
        normed = NORMS[norm]
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False),
            normed(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            normed(out),
        )
        same = channels == out and stride == 1
        changed = [nn.Conv2d(channels, out, 1, stride, bias=False), normed(out)]
        self.shortcut = nn.Identity() if same else nn.Sequential(*changed)

    def forward(self, images: Tensor) -> Tensor:
        joined: Tensor = self.body(images) + self.shortcut(images)
        return joined.relu()


def resnet18(classes: int, width: int, norm: str) -> nn.Sequential:
    """Images (images, 1, side, side) in, scores (images, classes) out. The paper's width is 64.

    `norm` is "batch" or "group" (Wu & He, 2018: groups of 16 channels, free of the batch).
    """
    if norm not in NORMS:
        raise ValueError(f"resnet18: no norm {norm!r}; there are {', '.join(NORMS)}")
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), NORMS[norm](width), nn.ReLU()]
    widths = [width, *(width * times for times, _ in BLOCKS)]
    blocks = [
        Residual(before, after, stride, norm)
        for before, after, (_, stride) in zip(widths[:-1], widths[1:], BLOCKS, strict=True)
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*stem, *blocks, *head)
