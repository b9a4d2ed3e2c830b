"""Image classification by a ResNet-18 or a small vision transformer: all parameters dense.

The counterpart of the sparse workloads, and the one of Cyclic Data Parallelism (Fournier & Oyallon, 2024), whose
activations outweigh its parameters. Both models are sequences of their parts, so whoever cuts them into stages need not
read them.

Images are labelled and grey. Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017; MIT licence) is read from Debian's package.
The digits (Alpaydin & Kaynak, 1998) come from inside an installed scikit-learn, which need not be imported. Patterns
are made up.

Source: He et al., CVPR 2016, with the stem usual for 32 x 32 images (one 3 x 3 convolution, no pooling). Dosovitskiy et
al., ICLR 2021. Departures: patches are averaged at the end instead of read off a class token (Beyer et al., 2022), and
there is no dropout.
"""

import functools
import gzip
import importlib.util
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from armillary.workloads import shares

__all__ = [
    "NORMS",
    "SMALL",
    "Block",
    "Images",
    "Patches",
    "Residual",
    "Vision",
    "digits",
    "fashion_mnist",
    "patterns",
    "read_idx",
    "resnet18",
    "vit",
    "workload",
]

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


class Patches(nn.Module):
    """Images (images, 1, side, side) to patch vectors (images, patches, width) with learned positions."""

    def __init__(self, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))

    def forward(self, images: Tensor) -> Tensor:
        vectors: Tensor = self.cut(images).flatten(2).transpose(1, 2)
        return vectors + self.positions


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to its normed input's origin (pre-norm)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, vectors: Tensor) -> Tensor:
        images, patches, width = vectors.shape
        split = self.queries_keys_values(self.norm_attention(vectors))
        split = split.view(images, patches, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*split.unbind(0)).transpose(1, 2).reshape(vectors.shape)
        vectors = vectors + self.projection(attended)
        out: Tensor = vectors + self.perceptron(self.norm_perceptron(vectors))
        return out


class Mean(nn.Module):
    """The average over the patches."""

    def forward(self, vectors: Tensor) -> Tensor:
        return vectors.mean(1)


def vit(side: int, classes: int, width: int, depth: int) -> nn.Sequential:
    """Images (images, 1, side, side) in, scores (images, classes) out; heads of 16, 8 x 8 patches, or
    fewer if they would be smaller than 2 x 2 pixels."""
    patch = max(2, side // 8)
    if side % patch or width % 16:
        raise ValueError(f"vit: side {side} must be a multiple of {patch} and width {width} of 16")
    blocks = [Block(width, width // 16) for _ in range(depth)]
    return nn.Sequential(Patches(side, patch, width), *blocks, nn.LayerNorm(width), Mean(), nn.Linear(width, classes))


FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Images:
    """Square images of one channel, 0 to 255, and their classes."""

    train: Pixels  # (images, side, side)
    train_labels: Labels  # (images,)
    held_out: Pixels
    held_out_labels: Labels

    def __post_init__(self) -> None:
        for images, labels in ((self.train, self.train_labels), (self.held_out, self.held_out_labels)):
            if images.ndim != 3 or images.shape[1] != images.shape[2] or len(images) != len(labels):
                raise ValueError(f"images {images.shape} and labels {labels.shape} do not fit together")

    @property
    def side(self) -> int:
        return int(self.train.shape[1])

    @property
    def classes(self) -> int:
        return int(self.train_labels.max()) + 1

    @functools.cached_property
    def scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the training pixels."""
        return float(self.train.mean()), float(self.train.std())


def fashion_mnist() -> Images:
    """60,000 and 10,000 images of clothes in ten classes, 28 x 28 padded by black to 32 x 32.

    Raises ValueError with the command that installs them if they are not there.
    """
    names = [f"{split}-{kind}" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    paths = [FASHION_MNIST / f"{name}-ubyte.gz" for name in names]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"{missing[0]} is not there; run: apt-get install dataset-fashion-mnist "
            "(or take data=digits, which comes with scikit-learn)"
        )
    train, train_labels, held_out, held_out_labels = (read_idx(path) for path in paths)
    wide = ((0, 0), (2, 2), (2, 2))
    return Images(
        np.pad(train, wide),
        train_labels.astype(np.int64),
        np.pad(held_out, wide),
        held_out_labels.astype(np.int64),
    )


def read_idx(path: Path) -> Pixels:
    """An array from a gzipped IDX file of bytes: 0, 0, type 8, dimensions, each size, then the values."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or no gzip file ({error}); fetch it anew") from error
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an IDX file of bytes: it starts with {raw[:4]!r}")
    shape = struct.unpack_from(f">{raw[3]}I", raw, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def digits() -> Images:
    """1,797 digits of 8 x 8, every tenth held out. Raises ValueError if scikit-learn is not installed."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ValueError("data=digits reads its images from scikit-learn; run: pip install scikit-learn")
    rows = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels, labels = (rows[:, :-1] * 15).astype(np.uint8).reshape(-1, 8, 8), rows[:, -1].astype(np.int64)
    return by_tens(pixels, labels)


def patterns(images: int, side: int, classes: int) -> Images:
    """A fixed random pattern a class, under noise of a third of its contrast."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, images)
    noisy = rng.uniform(0, 255, (classes, side, side))[labels] + rng.normal(0, 25, (images, side, side))
    return by_tens(noisy.clip(0, 255).astype(np.uint8), labels)


def by_tens(pixels: Pixels, labels: Labels) -> Images:
    held_out = np.arange(len(labels)) % 10 == 0
    return Images(pixels[~held_out], labels[~held_out], pixels[held_out], labels[held_out])


SMALL = {"data": "patterns", "norm": "group", "width": 4, "batch_size": 4, "learning_rate": 0.002}

Batch = tuple[Tensor, Tensor]
DATA = ("fashion-mnist", "digits", "patterns")
ARCHITECTURES = ("resnet18", "vit")
VIT = {"width": 64, "learning_rate": 1e-3, "steps": 2000}  # defaults where they differ from the ResNet's


@dataclass(frozen=True)
class Vision:
    """The workload. `data` is "fashion-mnist", "digits" or "patterns" (made up).

    A batch is (images, labels): float32 (batch_size, 1, side, side), the training pixels having mean 0
    and deviation 1, and int64 (batch_size,).
    """

    data: str = "fashion-mnist"
    architecture: str = "resnet18"
    norm: str = "batch"  # of resnet18: "batch" or "group"
    width: int = 16  # the ResNet paper's is 64
    depth: int = 4  # of vit
    batch_size: int = 64
    learning_rate: float = 0.05
    steps: int = 1000
    name: str = "vision"
    unit: str = "images"

    def __post_init__(self) -> None:
        for field, known in (("data", DATA), ("architecture", ARCHITECTURES)):
            if getattr(self, field) not in known:
                raise ValueError(f"vision: no {field} {getattr(self, field)!r}; there are {', '.join(known)}")
        for field in ("width", "depth", "batch_size", "steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"vision: {field} is {getattr(self, field)}, must be at least 1")

    @functools.cached_property
    def images(self) -> Images:
        if self.data == "patterns":
            return patterns(images=400, side=8, classes=4)
        return digits() if self.data == "digits" else fashion_mnist()

    def model(self) -> nn.Sequential:
        if self.architecture == "vit":
            return vit(self.images.side, self.images.classes, self.width, self.depth)
        return resnet18(self.images.classes, self.width, self.norm)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Momentum SGD for the ResNet, AdamW for the transformer: what each was published with."""
        if self.architecture == "vit":
            return torch.optim.AdamW(parameters, self.learning_rate, weight_decay=0.05)
        return torch.optim.SGD(parameters, self.learning_rate, momentum=0.9, weight_decay=5e-4)

    def batches(self, split: str, worker: int, workers: int, seed: int) -> Iterator[Batch]:
        data = self.images
        pixels, labels = (data.train, data.train_labels) if split == "train" else (data.held_out, data.held_out_labels)
        mean, deviation = data.scale
        for mine in shares.draw(split, len(labels), self.batch_size, (worker, workers), seed):
            images = (torch.from_numpy(pixels[mine])[:, None].float() - mean) / deviation
            yield images, torch.from_numpy(labels[mine])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy in nats."""
        return F.cross_entropy(scored(model, batch), batch[1])

    def samples(self, batch: Batch) -> int:
        return len(batch[1])

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        scores, labels = scored(model, batch), batch[1]
        return {
            "nll": F.cross_entropy(scores, labels, reduction="sum").item(),
            "correct": float((scores.argmax(1) == labels).sum()),
            "images": float(len(labels)),
        }

    def report(self, totals: dict[str, float]) -> dict[str, float]:
        images = totals["images"]
        return {"nats_per_image": totals["nll"] / images, "accuracy": totals["correct"] / images}


def scored(model: nn.Module, batch: Batch) -> Tensor:
    scores: Tensor = model(batch[0].to(next(model.parameters()).dtype))
    return scores


def workload(**options: Any) -> Vision:
    """The vision workload with `options`, fields of Vision; reads its images, so that errors come early."""
    defaults = VIT if options.get("architecture") == "vit" else {}
    chosen = Vision(**{**defaults, **options})
    _ = chosen.images
    return chosen
