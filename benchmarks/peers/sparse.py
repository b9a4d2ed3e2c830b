"""The workloads' models with sparse gradients of their tables: what a user of `sparse=True` has to write."""

import torch
from torch import Tensor, nn

from armillary.workloads.language_model import SampledSoftmaxLSTM, log_expected

PLAIN_NAMES = {"table.weight": "output"}  # what `sparse_lstm` calls a parameter -> what the plain model does


class SparseLSTM(SampledSoftmaxLSTM):
    """Both tables give sparse gradients; the bias, read by `index_select`, stays dense.

    The output table becomes a module: DDP and DeepSpeed find sparse gradients by `nn.Embedding(sparse=True)` alone.
    """

    def forward(self, words: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        hidden = self.hidden(words)
        right = targets.flatten()
        rows = self.table(torch.cat([right, negatives]))
        score = (hidden * rows[: len(right)]).sum(1) + self.bias.index_select(0, right)
        shift = self.bias.index_select(0, negatives) - log_expected(negatives, self.vocabulary).to(hidden)
        others = torch.addmm(shift, hidden, rows[len(right) :].t())
        others = others.masked_fill(negatives == right[:, None], -torch.inf)
        return torch.cat([score[:, None], others], dim=1)


def sparse_lstm(model: SampledSoftmaxLSTM) -> nn.Module:
    """The same model, its parameters included."""
    model.__class__ = SparseLSTM
    model.embedding.sparse = True
    model.table = nn.Embedding.from_pretrained(model.output.detach(), freeze=False, sparse=True)
    del model.output
    return model


def sparse_embeddings(model: nn.Module) -> nn.Module:
    """The same model, its embeddings giving sparse gradients."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = True
    return model


def sparse_bags(model: nn.Module) -> nn.Module:
    """The same model, its bags giving sparse gradients."""
    for bag in model.modules():
        if isinstance(bag, nn.EmbeddingBag):
            bag.sparse = True
    return model
