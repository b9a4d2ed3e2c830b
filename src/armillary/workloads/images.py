"""Labelled grey images: Fashion-MNIST, small scanned digits, or made-up patterns.

Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017; MIT licence) is read from Debian's package, the digits (Alpaydin &
Kaynak, 1998) from inside an installed scikit-learn, which need not be imported.
"""

import functools
import gzip
import importlib.util
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["Images", "digits", "fashion_mnist", "patterns", "read_idx"]

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
