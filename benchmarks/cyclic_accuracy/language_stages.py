"""The language model as a chain of four stages, which no tracer can make of it: it draws on weights by row.

The stages hold the parameters of the workload's own model and compute what it computes, bit for bit (a test says so).
A value is (what was computed so far, targets, negatives).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.workloads.language_model import SampledSoftmaxLSTM, expected_counts

__all__ = ["language_stages", "sampled_loss"]

Value = tuple[Tensor, Tensor, Tensor]


class Embedded(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, value: Value) -> Value:
        words, targets, negatives = value
        return self.embedding(words), targets, negatives


class Recurrent(nn.Module):
    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, value: Value) -> Value:
        states, _ = self.lstm(value[0])
        return states.flatten(0, 1), value[1], value[2]


class Projected(nn.Module):
    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, value: Value) -> Value:
        return self.projection(value[0]), value[1], value[2]


class Scored(nn.Module):
    """Scores of the right word and of the sampled wrong ones, as SampledSoftmaxLSTM.forward makes them."""

    def __init__(self, output: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.output, self.bias = output, bias

    def forward(self, value: Value) -> Tensor:
        hidden, targets, negatives = value
        right = targets.flatten()
        score = (hidden * F.embedding(right, self.output)).sum(1) + self.bias.index_select(0, right)
        expected = expected_counts(negatives, len(negatives), len(self.output)).log().to(hidden)
        shift = self.bias.index_select(0, negatives) - expected
        others = torch.addmm(shift, hidden, F.embedding(negatives, self.output).t())
        return torch.cat([score[:, None], others.masked_fill(negatives == right[:, None], -torch.inf)], dim=1)


def language_stages(model: SampledSoftmaxLSTM) -> list[nn.Module]:
    return [
        Embedded(model.embedding),
        Recurrent(model.lstm),
        Projected(model.projection),
        Scored(model.output, model.bias),
    ]


def sampled_loss(scores: Tensor, _target: object) -> Tensor:
    """Mean cross entropy; column 0 is the right word's."""
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))
