"""Fashion-MNIST, and the two nets: trained once, and kept outside of the repository's files."""

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FOLDER = Path("/usr/share/datasets/fashion-mnist")
KEPT = Path(__file__).resolve().parents[2] / ".cache" / "repurpose"
TRAINED_ON, CALIBRATES, JUDGES = 50_000, {"mlp": 2048, "vgg": 512}, {"mlp": 7500, "vgg": 5000}  # of 60,000
EPOCHS = {"mlp": 3, "vgg": 1}
BATCH = 250


def mlp(width: int = 512) -> nn.Sequential:
    hidden = [part for _ in range(3) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def vgg(width: int = 128) -> nn.Sequential:
    """Four convolutions of at most `width` channels, then a layer of 128."""
    channels = [(1, width // 4), (width // 4, width // 2), (width // 2, width), (width, width)]
    blocks = [
        [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        for before, after in channels
    ]
    pools: list[list[nn.Module]] = [[nn.MaxPool2d(2)], [nn.MaxPool2d(2)], [nn.MaxPool2d(2)], []]
    convolutions = [part for block, pool in zip(blocks, pools, strict=True) for part in (*block, *pool)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(9 * width, 128), nn.ReLU(), nn.Linear(128, 10))


NETS = {"mlp": mlp, "vgg": vgg}


def images(split: str) -> tuple[Tensor, Tensor]:
    """(n, 1, 28, 28) in 0 to 1 and labels, of "train" or "t10k"."""
    pixels, labels = (
        np.frombuffer(gzip.decompress((FOLDER / f"{split}-{kind}-ubyte.gz").read_bytes()), np.uint8, offset=offset)
        for kind, offset in (("images-idx3", 16), ("labels-idx1", 8))
    )
    return torch.tensor(pixels).view(-1, 1, 28, 28).float() / 255, torch.tensor(labels).long()


def accuracy(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        right = [(model(some).argmax(1) == want).sum() for some, want in zip(x.split(1000), labels.split(1000))]
    return float(sum(right)) / len(x)


def calibration(name: str, x: Tensor, is_small: bool) -> Sequence[Tensor]:
    return x[TRAINED_ON : TRAINED_ON + (128 if is_small else CALIBRATES[name])].split(256)


def trained(name: str, seed: int, is_small: bool) -> nn.Module:
    """Of AdamW with a rate that warms up and falls; from the file where it is kept."""
    path = KEPT / f"{name}-{seed}{'-small' * is_small}.pt"
    torch.manual_seed(seed)
    model = NETS[name](32) if is_small else NETS[name]()
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model.eval()
    x, labels = images("train")
    steps = 20 if is_small else EPOCHS[name] * TRAINED_ON // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    order = torch.cat([torch.randperm(TRAINED_ON) for _ in range(EPOCHS[name])])
    for some in order.split(BATCH)[:steps]:
        optimizer.zero_grad()
        F.cross_entropy(model(x[some]), labels[some]).backward()
        optimizer.step()
        rate.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.eval()
