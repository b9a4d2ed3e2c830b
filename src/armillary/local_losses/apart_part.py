"""One part that is trained apart: a module with batches and a loss of its own, to be saved and handed over."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.local_losses.hand_over import HandOver, PartBatch, fingerprint, handed_over
from armillary.models.split_loss import Batch, SplitLoss

__all__ = ["Agreed", "ApartPart", "Codes"]

FORMAT = 1


class Agreed(NamedTuple):
    """What all parts of a model share.

    Args:
        noise: of codes that are read, in units of kappa; None where parts read outputs.
    """

    loss: SplitLoss
    labels: Callable[[Batch], Tensor]
    classes: int
    kappa: float
    seed: int
    noise: float | None
    parts: int

    def classes_of(self, batch: Batch) -> Tensor:
        """
        Raises:
            ValueError: one is not from 0 to classes - 1.
        """
        found = self.labels(batch).long()
        if len(found) and (int(found.min()) < 0 or int(found.max()) >= self.classes):
            raise ValueError(
                f"local_losses: labels from {int(found.min())} to {int(found.max())}; want 0 to {self.classes - 1}, as "
                f"classes={self.classes} says"
            )
        return found

    def settings(self) -> dict[str, Any]:
        """What two runs must have alike, by the names that users give."""
        return {name: getattr(self, name) for name in ("parts", "classes", "kappa", "seed", "noise")}


class Codes(NamedTuple):
    """Of one part.

    Args:
        below: what the part below learns to give, (*shape of a sample's output, classes); None for the first.
        own: what this one learns to give, (neurons, classes); None for the last.
    """

    number: int
    below: Tensor | None
    own: Tensor | None


class ApartPart(nn.Module):
    """A part of a model. Called, it is that part alone.

    Args:
        below: the part before, None for the first.
    """

    def __init__(self, body: nn.Module, codes: Codes, agreed: Agreed, below: "ApartPart | None") -> None:
        super().__init__()
        self.body, self.number = body, codes.number
        self.learnt_from = ""  # hash of the parts below whose outputs it has read
        self._codes, self._agreed, self._below = codes, agreed, (below,)  # in a tuple: not one more child
        self._began = fingerprint(dict(body.named_parameters()))
        self._kept: tuple[Any, HandOver] | None = None  # a loader, and what was made of it

    def forward(self, *given: Any) -> Any:
        return self.body(*given)

    @property
    def codes(self) -> Tensor | None:
        """(neurons, classes): a column is what this part learns to give for its class. None for the last part."""
        return self._codes.own

    @property
    def settings(self) -> dict[str, Any]:
        """Of all parts of this model."""
        return self._agreed.settings()

    @property
    def is_trained(self) -> bool:
        """Whether its weights have moved, by training or by `load`."""
        return fingerprint(dict(self.body.named_parameters())) != self._began

    def batches(self, source: Iterable[Batch] | HandOver, epochs: int = 1, first_epoch: int = 0) -> Iterator[PartBatch]:
        """What this part reads. The first part, and every concurrent one, passes over the loader once an epoch. Others
        make the outputs of the part below once, and draw a new order of samples for each epoch.

        Args:
            source: a loader, or what the part below handed over.
            first_epoch: of a run that goes on; epochs from there on are those of a run that never stopped.

        Raises:
            ValueError: the part below is not trained, or was trained on since its outputs were made.
        """
        below, agreed = self._below[0], self._agreed
        if below is None or agreed.noise is not None:
            if isinstance(source, HandOver):
                raise ValueError(f"local_losses: part {self.number} reads no outputs of another; give it the loader")
            for epoch in range(first_epoch, epochs):
                yield from self._read(source, epoch)
            return
        made = source if isinstance(source, HandOver) else self._made(below, source)
        for epoch in range(first_epoch, epochs):
            self._refuse_other(made, below)
            self.learnt_from = made.made_by
            draw = _generator(agreed.seed, "order", self.number, epoch)
            yield from made.picked(torch.randperm(made.samples, generator=draw))

    def loss(self, given: PartBatch) -> Tensor:
        """A scalar: of the last part the model's own loss, of another the mean squared distance to the codes."""
        output = self.body(*given.inputs)
        if self._codes.own is None:
            return self._agreed.loss.of_output(output, given.batch)
        wanted = self._codes.own.to(output)[:, self._agreed.classes_of(given.batch)].T
        return F.mse_loss(output.flatten(1), wanted)

    def hand_over(self, source: Iterable[Batch] | HandOver) -> HandOver:
        """The outputs of this part, trained, for all samples: for `batches` of the next part, here or elsewhere.

        Args:
            source: a loader, or what the part below handed over.

        Raises:
            ValueError: the part is not trained.
        """
        if not self.is_trained:
            raise ValueError(
                f"local_losses: part {self.number} is not trained, so its outputs would teach nothing; train it, or "
                "load it"
            )
        below = self._below[0]
        if below is None:
            read = self._read(source, 0) if not isinstance(source, HandOver) else source.in_order()
            return handed_over(self.number, self.body, read, self._hash(""))
        made = source if isinstance(source, HandOver) else self._made(below, source)
        self._refuse_other(made, below)
        return handed_over(self.number, self.body, made.in_order(), self._hash(made.made_by))

    def save(self, path: str | Path) -> None:
        """Weights and buffers of this part, and what its codes are drawn from: one file."""
        kept = {"state": self.body.state_dict(), "learnt_from": self.learnt_from}
        torch.save({"format": FORMAT, "part": self.number, **self._agreed.settings(), **kept}, path)

    def load(self, path: str | Path) -> None:
        """
        Raises:
            ValueError: the file is of another part, or of other settings: its codes would be others.
        """
        try:
            found = torch.load(path, weights_only=True)
            version = found["format"]
        except Exception as error:
            raise ValueError(f"local_losses: {path} is no part ({error}); save it again") from error
        mine = {"format": FORMAT, "part": self.number, **self._agreed.settings()}
        for name, wanted in mine.items():
            if found.get(name) != wanted:
                raise ValueError(
                    f"local_losses: {path} was saved with {name} {found.get(name)}, here it is {wanted}; call apart as "
                    f"there, or load the file of part {self.number} of this run"
                )
        assert version == FORMAT
        self.body.load_state_dict(found["state"])
        self.learnt_from = found["learnt_from"]

    def refuse_broken_chain(self) -> None:
        """
        Raises:
            ValueError: it has learnt from outputs of other weights than the parts below have now.
        """
        below = self._below[0]
        if below is not None and self.learnt_from and self.learnt_from != below._chain():
            raise ValueError(
                f"local_losses: part {below.number} is not as it was when part {self.number} learnt from its outputs; "
                f"train part {self.number} again, or load part {below.number} as it was"
            )

    def _read(self, loader: Iterable[Batch], epoch: int) -> Iterator[PartBatch]:
        """Of the loader, or codes with noise."""
        for number, batch in enumerate(loader):
            if self._codes.below is None or self._agreed.noise is None:
                yield PartBatch(self._agreed.loss.input_of(batch), batch)
                continue
            read = self._codes.below[..., self._agreed.classes_of(batch).to(self._codes.below.device)].movedim(-1, 0)
            draw = _generator(self._agreed.seed, "noise", self.number, epoch, number)
            noise = torch.randn(read.shape, generator=draw).to(read)
            yield PartBatch((read + self._agreed.noise * self._agreed.kappa * noise,), batch)

    def _made(self, below: "ApartPart", loader: Iterable[Batch]) -> HandOver:
        """The outputs below for this loader; once, as long as the parts below stay as they are."""
        if self._kept is None or self._kept[0] is not loader or self._kept[1].made_by != below._chain():
            self._kept = loader, below.hand_over(loader)
        return self._kept[1]

    def _refuse_other(self, made: HandOver, below: "ApartPart") -> None:
        if made.part != below.number:
            raise ValueError(
                f"local_losses: part {self.number} reads the outputs of part {below.number}, these are of part "
                f"{made.part}; give those of part {below.number}"
            )
        if below.is_trained and made.made_by != below._chain():
            raise ValueError(
                f"local_losses: part {below.number} was trained on since these outputs were made; call hand_over again"
            )

    def _hash(self, below: str) -> str:
        return hashlib.sha256(f"{below} {fingerprint(self.body.state_dict())}".encode()).hexdigest()

    def _chain(self) -> str:
        """Hash of this part and of those below."""
        below = self._below[0]
        return self._hash("" if below is None else below._chain())


def _generator(*names: Any) -> torch.Generator:
    return torch.Generator().manual_seed(random.Random("/".join(map(str, names))).getrandbits(63))
