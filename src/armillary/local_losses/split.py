"""Local losses: each part of a model learns from a loss of its own, made by a head on what the part hands on.

No gradient crosses from part to part, so the activations of one part are gone before the next one runs. With `reach=2`
the loss of a part also reaches the part below, and two of them are held at a time.

`loss` is one scalar with one backward: a single `autograd.Function` makes the gradients of all parts in its forward and
hands them out in its backward, times what came in. So exchanges, accumulation and hooks see an ordinary backward.

Source: Laskin et al., Parallel Training of Deep Networks with Local Updates, 2020 (chunked, greedy, overlapping); Wang
et al., InfoPro, ICLR 2021. Departure: heads run in training only, and belong to no inference.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from armillary.local_losses.heads import ImageDecoder, InfoProWeights, heads_of, refuse_no_images
from armillary.local_losses.slices import sliced
from armillary.models.split_loss import Autocast, Batch, Loss, SplitLoss, device_type_of, without_autocast
from armillary.models.structure import mapped, take_apart

__all__ = ["HeadedPart", "LocalLosses", "split"]

OfOutput = Callable[[Any, Batch], Tensor]
Gradients = dict[Tensor, Tensor | None]


def split(
    model: nn.Module,
    loss: Loss,
    example: Batch,
    at: Sequence[str] | int = (),
    *,
    parts: Sequence[nn.Module] | None = None,
    head: nn.Module | Sequence[nn.Module] | Literal["linear", "convolution"] | None = None,
    objective: Literal["task", "infopro"] = "task",
    reach: int = 1,
    weights: InfoProWeights | None = None,
) -> "LocalLosses":
    """The model in parts that share its weights, with a head for each but the last.

    Args:
        loss: loss(model, batch) -> scalar, which calls the model once.
        example: a batch to find shapes with; nothing is trained on it.
        at: paths of the modules of an `nn.Sequential` that begin part 1, part 2, and so on; or the number of parts,
            cut where their operations are balanced.
        parts: instead of `at`, for any other model: modules whose calls one after the other are its forward.
        head: from what a part hands on to the form of the model's output: one module for each part but the last. None:
            linear on the last dimension; from images to classes InfoPro's. "linear" and "convolution" ask for one of
            the two; from images "linear" pools before.
        objective: "task" is the loss of the head's output. "infopro" adds the cross entropy of a decoder's images with
            those that the model is given, which must be in 0 to 1.
        reach: 1: a loss teaches its own part. 2: also the part below (overlapping).
        weights: of the two losses of "infopro".

    Raises:
        ValueError: a cut, a head or an objective that the model does not have; the message says what to give.
    """
    if objective not in ("task", "infopro"):
        raise ValueError(f"local_losses: objective is 'task' or 'infopro', got {objective!r}")
    if reach not in (1, 2):
        raise ValueError(f"local_losses: reach is 1 or 2, got {reach!r}")
    cut = sliced(model, loss, example, at, parts)
    heads = heads_of(cut.outputs, head)
    decoders: list[nn.Module | None] = [None] * len(heads)
    shares = [(0.0, 1.0)] * len(heads)
    if objective == "infopro":
        images = refuse_no_images(cut.loss.input_of(example), cut.outputs[:-1])
        decoders = [ImageDecoder(value.shape[1], images).to(value.device, value.dtype) for value in cut.outputs[:-1]]
        shares = [(weights or InfoProWeights()).of(part, len(cut.slices)) for part in range(len(heads))]
    asked = AskedOfSplit(head if isinstance(head, str) else "", objective, reach)
    made = {
        one.path.replace(".", "_"): HeadedPart(one.module, own, decoder, share, cut.loss.input_of, asked)
        for one, own, decoder, share in zip(cut.slices, heads, decoders, shares, strict=False)
    }
    last = cut.slices[-1]
    made[last.path.replace(".", "_")] = HeadedPart(last.module, asked=asked)
    local = LocalLosses(made, cut.loss, model, reach)
    _try_heads(local, cut.outputs, cut.loss.of_output, example)
    return local


class AskedOfSplit(NamedTuple):
    """What `split` was asked for, as a schedule may name it. head: empty where the form decides, or the user."""

    head: str = ""
    objective: str = "task"
    reach: int = 1


class HeadedPart(nn.Module):
    """A part of a model. Called, it is that part alone; its head and decoder run in `own_loss` only.

    Args:
        head: None for the last part, which has the model's own loss.
        decoder: back to the images that `input_of(batch)` begins with; None: the head's loss is all.
        share: what the decoder's loss and the head's weigh.
        asked: of `split`, of the whole model.
    """

    def __init__(
        self,
        body: nn.Module,
        head: nn.Module | None = None,
        decoder: nn.Module | None = None,
        share: Sequence[float] = (0.0, 1.0),
        input_of: Callable[[Batch], tuple[Any, ...]] | None = None,
        asked: AskedOfSplit = AskedOfSplit(),  # noqa: B008
    ) -> None:
        super().__init__()
        self.body, self.head, self.decoder, self.asked = body, head, decoder, asked
        self._share, self._input_of = share, input_of

    def forward(self, *given: Any) -> Any:
        return self.body(*given)

    def own_loss(self, output: Any, batch: Batch, loss: OfOutput) -> Tensor:
        """
        Args:
            output: what the part has made of the batch.
            loss: (output in the model's form, batch) -> scalar.
        """
        if self.head is None:
            return loss(output, batch)
        task = loss(self.head(output), batch)
        if self.decoder is None or self._input_of is None:
            return task
        rebuilt = F.binary_cross_entropy(self.decoder(output), self._input_of(batch)[0])
        return self._share[0] * rebuilt + self._share[1] * task


class LocalLosses(nn.Sequential):
    """A model in parts with heads. Called, it is the model; `loss(batch)` is what to train by.

    Args:
        parts: by name.
        loss: of the model, taken apart.
        model: whose weights the parts share.
        reach: how many parts a loss teaches.
    """

    def __init__(self, parts: Mapping[str, HeadedPart], loss: SplitLoss, model: nn.Module, reach: int = 1) -> None:
        super().__init__(OrderedDict(parts))
        self.reach = reach
        self._split = loss
        self._plain = (model,)  # not one more child

    def forward(self, *given: Any) -> Any:
        first, *others = self
        value = first(*given)
        for part in others:
            value = part(value)
        return value

    def plain(self) -> nn.Module:
        """The model as it was given, with the weights as they are now, without heads."""
        return self._plain[0]

    def loss(self, batch: Batch) -> Tensor:
        """The sum over parts, a scalar. Its backward gives every part its gradient.

        Raises:
            ValueError: under autocast to float16: a GradScaler scales the loss, and gradients are made before that.
        """
        if not torch.is_grad_enabled():
            return self._summed(batch)
        now = Autocast.now(device_type_of(self.parameters()))
        if now.enabled and now.dtype == torch.float16:
            raise ValueError(
                "local_losses: under autocast to float16 a GradScaler would scale the loss after the gradients were "
                "made; take bfloat16, which needs no scaling"
            )
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        learn = self._learn_overlapping if self.reach == 2 else self._learn
        loss: Tensor = _LearntParts.apply(lambda: learn(batch), *weights)  # type: ignore[no-untyped-call]
        return loss

    @property
    def _parts(self) -> list[HeadedPart]:
        return [part for part in self if isinstance(part, HeadedPart)]

    def _summed(self, batch: Batch) -> Tensor:
        given, losses = self._split.input_of(batch), list[Tensor]()
        for part in self._parts:
            output = part(*given)
            losses.append(part.own_loss(output, batch, self._split.of_output))
            given = (output,)
        return _sum(losses)

    def _learn(self, batch: Batch) -> "_Learnt":
        given, losses, found = self._split.input_of(batch), list[Tensor](), Gradients()
        for part in self._parts:
            output = part(*given)
            loss = part.own_loss(output, batch, self._split.of_output)
            _add(found, _gradients([loss], [None], part))
            losses.append(loss.detach())
            given = (mapped(Tensor.detach, output),)
        return _Learnt(_sum(losses), found)

    def _learn_overlapping(self, batch: Batch) -> "_Learnt":
        """A part's gradient is made when the next part's loss has come down to what it handed on."""
        given, losses, found = self._split.input_of(batch), list[Tensor](), Gradients()
        below: _Pending | None = None
        for part in self._parts:
            output = part(*given)
            loss = part.own_loss(output, batch, self._split.of_output)
            if below is not None:
                with without_autocast(loss.device.type):
                    down = torch.autograd.grad(loss, below.leaves, retain_graph=True, allow_unused=True)
                reached = [pair for pair in zip(below.outputs, down, strict=True) if pair[1] is not None]
                outputs, downs = [one for one, _ in reached], [one for _, one in reached]
                _add(found, _gradients([below.loss, *outputs], [None, *downs], below.part))
            losses.append(loss.detach())
            given = (mapped(_leaf, output),)
            pairs = zip(take_apart(output).leaves, take_apart(given[0]).leaves, strict=True)
            crossing = [(made, leaf) for made, leaf in pairs if isinstance(leaf, Tensor) and leaf.requires_grad]
            below = _Pending(part, loss, [made for made, _ in crossing], [leaf for _, leaf in crossing])
        assert below is not None
        _add(found, _gradients([below.loss], [None], below.part))
        return _Learnt(_sum(losses), found)


class _Learnt(NamedTuple):
    """Of one batch: the sum of all losses, and the gradients of all weights that have one."""

    loss: Tensor
    gradients: Gradients


class _Pending(NamedTuple):
    """A part whose gradient waits for the next one. leaves: its outputs, cut off, which the next part reads."""

    part: nn.Module
    loss: Tensor
    outputs: list[Tensor]
    leaves: list[Tensor]


class _LearntParts(torch.autograd.Function):
    """Forward makes loss and gradients; backward hands the gradients out."""

    @staticmethod
    def forward(ctx: Any, learn: Callable[[], _Learnt], *weights: Tensor) -> Tensor:
        with torch.enable_grad():
            loss, found = learn()
        ctx.found = [found.get(weight) for weight in weights]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, into: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.found is None:
            raise RuntimeError("local_losses: backward of one loss(batch) a second time; call loss(batch) again")
        found, ctx.found = ctx.found[::-1], None
        given: list[Tensor | None] = [None]  # of `learn`
        while found:
            gradient = found.pop()  # so that each goes as its product comes
            given.append(None if gradient is None else gradient * into)
        return tuple(given)


def _gradients(outputs: Sequence[Tensor], into: Sequence[Tensor | None], part: nn.Module) -> Gradients:
    """Of the part's weights; its graph is gone afterwards."""
    weights = [weight for weight in part.parameters() if weight.requires_grad]
    asking = [pair for pair in zip(outputs, into, strict=True) if pair[0].requires_grad]
    if not weights or not asking:
        return {}
    with without_autocast(outputs[0].device.type):
        ends, heads = [one for one, _ in asking], [one for _, one in asking]
        found = torch.autograd.grad(ends, weights, heads, allow_unused=True)
    return dict(zip(weights, found, strict=True))


def _add(found: Gradients, more: Gradients) -> None:
    """Heads may share weights with one another, or with a part; these learn from each loss."""
    for weight, gradient in more.items():
        before = found.get(weight)
        found[weight] = gradient if before is None else before if gradient is None else before + gradient


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.is_floating_point())


def _sum(losses: Sequence[Tensor]) -> Tensor:
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def _try_heads(local: LocalLosses, outputs: Sequence[Any], loss: OfOutput, example: Batch) -> None:
    """
    Raises:
        ValueError: a head that the loss cannot read.
    """
    for number, (part, output) in enumerate(zip(local, outputs[:-1], strict=False)):
        try:
            with torch.random.fork_rng(), torch.no_grad():
                assert isinstance(part, HeadedPart) and part.head is not None
                kept = {name: buffer.clone() for name, buffer in part.head.named_buffers()}
                value = part.own_loss(output, example, loss)
                for name, buffer in part.head.named_buffers():
                    buffer.copy_(kept[name])
        except Exception as error:
            raise ValueError(
                f"local_losses: the loss fails on what the head of part {number} gives ({type(error).__name__}: "
                f"{error}); a head must give what the model gives"
            ) from error
        if value.numel() != 1:
            raise ValueError(f"local_losses: the loss gives {tuple(value.shape)}; want a scalar, a mean over the batch")
