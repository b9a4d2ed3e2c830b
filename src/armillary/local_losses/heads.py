"""Heads: from what a part hands on to the form of the model's output, so that the model's own loss teaches the part.

From images to classes a pooled linear layer is too weak: a lower part that it teaches may do worse than a random one
that is never trained. So the head there is the classifier of InfoPro's code ("1c2f").

Source: Wang et al., Revisiting Locally Supervised Learning (InfoPro), ICLR 2021, and its code. Departures: the
convolution has stride 2 at every width (the code's is 1 at 64 channels); the user's own loss stands for cross entropy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["HEADS", "ImageDecoder", "InfoProWeights", "heads_of", "refuse_no_images"]

HEADS = ("linear", "convolution")  # by name, where the form of what a part hands on is not to decide

HIDDEN, DECODED = 128, 12  # features of the classifier's hidden layer; channels of the decoder's, in InfoPro's code


@dataclass(frozen=True)
class InfoProWeights:
    """What weighs how much in the loss of part j of K: `first` at j = 0, `last` at j = K - 2, in between a line.

    Args of note:
        images: of the decoder's cross entropy with the input. task: of the head's loss.

    Source: the commands of InfoPro's code for ResNet-110 on CIFAR-10; `first` those for 2 parts, `last` those for 16.
    """

    images: tuple[float, float] = (5.0, 0.5)
    task: tuple[float, float] = (0.5, 1.0)

    def of(self, part: int, parts: int) -> tuple[float, float]:
        """(images, task) of a part, counted from 0."""
        share = part / (parts - 2) if parts > 2 else 0.0
        (first_images, last_images), (first_task, last_task) = self.images, self.task
        return first_images * (1 - share) + last_images * share, first_task * (1 - share) + last_task * share


class ImageDecoder(nn.Module):
    """From (samples, channels, height, width) back to the images that the model was given."""

    def __init__(self, channels: int, images: Tensor) -> None:
        super().__init__()
        self.size = tuple(images.shape[-2:])
        self.layers = nn.Sequential(
            nn.Conv2d(channels, DECODED, 3, padding=1),
            nn.BatchNorm2d(DECODED),
            nn.ReLU(),
            nn.Conv2d(DECODED, images.shape[1], 3, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.layers(F.interpolate(value, self.size, mode="bilinear", align_corners=True))
        return made


def heads_of(outputs: Sequence[Any], head: str | nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    """
    Args:
        outputs: of all parts on the example, the model's own last.
        head: the user's, one for each part but the last; or one of `HEADS`; None: by the form of what there is.

    Raises:
        ValueError: another number of heads, an unknown one, or forms between which there is no head.
    """
    *values, output = outputs
    if isinstance(head, str) and head not in HEADS:
        raise ValueError(f"local_losses: head is {' or '.join(map(repr, HEADS))}, or modules, got {head!r}")
    if head is None or isinstance(head, str):
        return [_head(number, value, output, head) for number, value in enumerate(values)]
    heads = [head] if isinstance(head, nn.Module) else list(head)
    if len(heads) != len(values):
        raise ValueError(f"local_losses: {len(values)} parts before the last want a head each, got {len(heads)}")
    return heads


def _head(number: int, value: Any, output: Any, kind: str | None) -> nn.Module:
    if isinstance(value, Tensor) and isinstance(output, Tensor) and value.is_floating_point():
        if value.dim() == 4 and output.dim() == 2 and len(value) == len(output):
            made = _pooled if kind == "linear" else _from_images
            return made(value.shape[1], output.shape[1]).to(value)
        if kind != "convolution" and value.dim() > 1 and value.shape[:-1] == output.shape[:-1]:
            return nn.Linear(value.shape[-1], output.shape[-1]).to(value)
    forms = [tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in (value, output)]
    named = f"{kind} head" if kind else "head"
    raise ValueError(
        f"local_losses: no {named} leads from what part {number} hands on, {forms[0]}, to the model's output, "
        f"{forms[1]}; give one, head=module (a list of them for several cuts)"
    )


def _pooled(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def _from_images(channels: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, classes),
    )


def refuse_no_images(given: tuple[Any, ...], values: Sequence[Any]) -> Tensor:
    """The images that decoders are to give back.

    Raises:
        ValueError: the model is given none, or none in 0 to 1; or a part hands on what is no image.
    """
    images = given[0]
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
        raise ValueError(
            "local_losses: objective='infopro' gives back images (samples, channels, height, width), which this model "
            "is not given; take objective='task'"
        )
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        raise ValueError(
            f"local_losses: objective='infopro' wants images in 0 to 1, these are in {low:.3g} to {high:.3g}; scale "
            "them inside of the model, or take objective='task'"
        )
    for number, value in enumerate(values):
        if not isinstance(value, Tensor) or value.dim() != 4:
            raise ValueError(
                f"local_losses: objective='infopro' decodes (samples, channels, height, width), and part {number} "
                "hands on something else; cut earlier, or take objective='task'"
            )
    return images
