"""Image classification by a ResNet-18 or a small vision transformer: all parameters dense.

The counterpart of the sparse workloads, and the one of Cyclic Data Parallelism (Fournier & Oyallon, 2024),
whose activations outweigh its parameters.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.workloads import shares
from armillary.workloads.images import Images, digits, fashion_mnist, patterns, resnet18, vit

__all__ = ["SMALL", "Vision", "workload"]

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
