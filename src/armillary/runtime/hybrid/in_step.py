"""What every rank says of itself with each exchange of gradients: its step, what it is doing, its optimizer's options.

Ranks whose loops go different ways pair the wrong exchanges, and nothing else would show it. It is three whole numbers
to every other rank, asked for before the first group leaves and read when all have landed, so nobody waits for it.

A rank whose backward reaches no parameter takes part in its `optimizer.step()` only. What the others do to their
gradients in between, clipping, say, it cannot do. So before such a step ranks tell whether they did anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.facts.collectives import AllToAll, Program

__all__ = ["BACKWARD", "LATE", "STEPS", "WROTE", "Word", "Words", "refuse_written", "said"]

BACKWARD, LATE, STEPS, WROTE = range(4)  # exchanges in its backward; in its step; steps; the same, and it wrote


class Word(NamedTuple):
    """step: optimizer steps taken. doing: one of those above. options: a number of the last step's."""

    step: int
    doing: int
    options: int

    @property
    def rest(self) -> int:
        """What a header of a look-up does not tell: one whole number, exact in float64."""
        return 4 * self.options + self.doing


@dataclass(frozen=True)
class Words:
    """By rank."""

    words: Sequence[Word]

    @classmethod
    def told(cls, step: int, rests: Sequence[int]) -> "Words":
        """On the headers of look-ups, all of one step."""
        return cls([Word(step, rest % 4, rest // 4) for rest in rests])

    @property
    def late(self) -> list[int]:
        return [rank for rank, word in enumerate(self.words) if word.doing == LATE]

    @property
    def has_one_option(self) -> bool:
        return len({word.options for word in self.words}) == 1


def said(word: Word, workers: int) -> Program[Words]:
    """Every rank's.

    Raises:
        RuntimeError: ranks are at different steps, or some are in a backward and others in a step. On every rank.
    """
    ones = (1,) * workers
    heard: Tensor = yield AllToAll(torch.tensor([word] * workers), ones, ones)
    words = Words([Word(*one) for one in heard.tolist()])
    _refuse_other_ways(words)
    return words


def _refuse_other_ways(heard: Words) -> None:
    """
    Raises:
        RuntimeError: ranks are at different steps, or some are in a backward and others in a step. On every rank.
    """
    steps, doing = [word.step for word in heard.words], [word.doing for word in heard.words]
    if len(set(steps)) > 1:
        raise RuntimeError(
            f"ranks have taken different numbers of optimizer steps {steps} (rank order), so gradients of other steps "
            "met; make as many backwards and steps on every rank. If a GradScaler skips steps, pass it to parallelize "
            "or attach (scaler=scaler)"
        )
    stepping = [rank for rank, one in enumerate(doing) if one in (STEPS, WROTE)]
    if stepping and len(stepping) < len(doing):
        others = [rank for rank in range(len(doing)) if rank not in stepping]
        raise RuntimeError(
            f"step {steps[0] + 1}: ranks {stepping} are in optimizer.step() while ranks {others} run another backward; "
            "make as many backwards a step on every rank, all but the last under run.no_sync()"
        )


def refuse_written(heard: Words, late: Sequence[int]) -> None:
    """
    Args:
        late: ranks that took part in the exchange in their step only.

    Raises:
        RuntimeError: a rank wrote into its gradients since. On every rank.
    """
    if wrote := [rank for rank, word in enumerate(heard.words) if word.doing == WROTE]:
        raise RuntimeError(
            f"step {heard.words[0].step + 1}: the backward of {_ranks(late)} reached no parameter, so gradients arrive "
            f"there in optimizer.step() only; {_ranks(wrote)} changed gradients between backward and step (clipping, "
            "scaling?), which would be missing there. Let every rank's loss reach a parameter, by adding 0.0 * "
            "sum(p.sum() for p in model.parameters()) where it reaches none"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
