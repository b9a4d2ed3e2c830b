"""What the curves are of: the paper's two text models in small, each with a goal that a few hundred steps reach.

Both learn by Adagrad, which torch carries out on sparse gradients as on dense ones: the translation workload's own
Adam refuses sparse gradients. Rates were sought in one process, over the batches of all workers. At the language
model's own 0.2 the loss shoots up at first, and what were rounding errors grow to hundredths of it: nobody could tell
then whether all sides compute the same. So it learns at half that rate.

Departure from the paper: translation goes to a perplexity, too. BLEU is then some hundredths, jumps from evaluation to
evaluation, and could only by chance be a goal.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.parallax.race import Goal
from benchmarks.peers.sparse import sparse_embeddings, sparse_lstm

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """
    Args:
        options: of the workload.
        sparse: makes the workload's model give sparse gradients of its tables.
        beside: metrics that are shown beside that of the goal.
        rate, accumulator: of Adagrad; its squared gradients begin at `accumulator`.
        steps: at most; an evaluation after each `turn_steps` of them.
        held_out_batches: that an evaluation takes, the first ones.
    """

    options: Mapping[str, Any]
    sparse: Callable[[Any], nn.Module]
    rate: float
    accumulator: float
    goal: Goal
    beside: tuple[str, ...]
    steps: int
    turn_steps: int
    held_out_batches: int

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, self.rate, initial_accumulator_value=self.accumulator)


TASKS: Mapping[str, Task] = {
    "language_model": Task(
        options={"width": 128, "hidden": 128, "batch_size": 32, "length": 24, "negatives": 1024},
        sparse=sparse_lstm, rate=0.1, accumulator=1e-3, goal=Goal("perplexity", 280.0, rises=False), beside=(),
        steps=300, turn_steps=20, held_out_batches=6,
    ),
    "translation": Task(
        options={"language": "de", "longest": 20, "min_count": 5, "width": 64, "hidden": 96, "batch_size": 32},
        sparse=sparse_embeddings, rate=0.15, accumulator=0.3, goal=Goal("perplexity", 75.0, rises=False),
        beside=("bleu",), steps=300, turn_steps=20, held_out_batches=100,
    ),
}  # fmt: skip
