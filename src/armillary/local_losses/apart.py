"""Parts of a network that are trained apart: each but the last learns to give a random code of the sample's class.

Part p learns to answer a sample of class y with column y of S_p, numbers drawn once from a seed. The last part learns
the task. Sequentially a part reads the outputs of the trained part below, made once. Concurrently it reads the code
that the part below is to give, with noise: no part waits for another, and nothing is sent.

Source: Karadag and Topaloglu, Partitioned Neural Network training via synthetic intermediate labels, 2024. Departures:
more than two parts; the concurrent form. This is not end-to-end training, so recovery may have to follow: epochs of the
ordinary loop over the whole model.
"""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from armillary.local_losses.apart_part import Agreed, ApartPart, Codes
from armillary.local_losses.cut_range import refuse_out_of_range
from armillary.local_losses.slices import sliced
from armillary.models.split_loss import Batch, Loss

__all__ = ["apart"]


def apart(
    model: nn.Module,
    loss: Loss,
    example: Batch,
    at: Sequence[str] | int = (),
    *,
    classes: int,
    labels: Callable[[Batch], Tensor] | None = None,
    parts: Sequence[nn.Module] | None = None,
    kappa: float = 1.0,
    seed: int = 0,
    concurrent: bool = False,
    noise: float = 0.03,
) -> list[ApartPart]:
    """The parts of a model, which share its weights, in the order in which they are trained.

    Args:
        loss: loss(model, batch) -> scalar, which calls the model once; the last part learns from it.
        example: a batch to find shapes with; nothing is trained on it.
        at, parts: where to cut, as in `split`.
        labels: batch -> classes of its samples, integers (samples,) from 0 to classes - 1.
        kappa: codes are drawn from 0 to kappa.
        seed: of the codes, the order of samples and the noise.
        concurrent: parts read codes with noise instead of the outputs of the part below.
        noise: deviation of that noise, in units of kappa.

    Raises:
        ValueError: a cut that the model does not have, a task without classes, or codes that a part cannot give.
    """
    cut = sliced(model, loss, example, at, parts)
    if labels is None:
        raise ValueError(
            "local_losses: apart wants labels, batch -> classes of its samples, as in labels=lambda batch: batch[1]"
        )
    agreed = Agreed(cut.loss, labels, classes, kappa, seed, noise if concurrent else None, len(cut.slices))
    _refuse_other_labels(labels(example), cut.outputs[0])
    agreed.classes_of(example)
    codes, given = list[Tensor](), cut.loss.input_of(example)
    for number, (one, output) in enumerate(zip(cut.slices, cut.outputs, strict=True)):
        if not any(weight.requires_grad for weight in one.module.parameters()):
            raise ValueError(f"local_losses: part {number} has no weight to train; cut elsewhere")
        if number == len(cut.slices) - 1:
            break
        _refuse_other_output(number, output, classes)
        refuse_out_of_range(number, one.module, given, kappa)
        draw = torch.Generator().manual_seed(random.Random(f"{seed}/{number}").getrandbits(63))
        codes.append((kappa * torch.rand(output[0].numel(), classes, generator=draw)).to(output))
        given = (output,)
    made = list[ApartPart]()
    for number, one in enumerate(cut.slices):
        below = codes[number - 1].view(*cut.outputs[number - 1].shape[1:], classes) if number else None
        own = codes[number] if number < len(codes) else None
        made.append(ApartPart(one.module, Codes(number, below, own), agreed, made[-1] if made else None))
    return made


def _refuse_other_labels(found: Tensor, output: object) -> None:
    """
    Raises:
        ValueError: they are no classes, or not one of each sample.
    """
    if found.is_floating_point() or found.is_complex():
        raise ValueError(
            f"local_losses: labels are {found.dtype}; apart draws a code for each class, and a regression has none. "
            "Take split, which needs no classes"
        )
    samples = len(output) if isinstance(output, Tensor) else len(found)
    if found.dim() != 1 or len(found) != samples:
        raise ValueError(
            f"local_losses: labels have shape {tuple(found.shape)} for {samples} samples; apart wants one class a "
            "sample, and the words of a vocabulary are more. Take split"
        )


def _refuse_other_output(number: int, output: object, classes: int) -> None:
    """
    Raises:
        ValueError: it cannot be a code.
    """
    if not isinstance(output, Tensor) or not output.is_floating_point() or output.dim() < 2:
        raise ValueError(f"local_losses: part {number} hands on no tensor of real numbers by sample; cut elsewhere")
    if classes > output[0].numel():
        raise ValueError(
            f"local_losses: part {number} hands on {output[0].numel()} numbers a sample, and there are {classes} "
            "classes; cut where the model is at least as wide"
        )
