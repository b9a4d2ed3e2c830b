"""TorchRec: tables in blocks of rows (row_wise) with its fused optimizer, the rest of the model under its DDP.

Two things a user can do by hand, who knows the data: scramble ids, as TorchRec's blocks of neighbouring rows overload
the owner of the frequent ones; and look up each row once. (TorchRec's own `use_index_dedup` has no CPU kernel.)
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import KeyedOptimizerWrapper

from benchmarks.measuring.model import LanguageModel
from benchmarks.peers.case import Case, Step, plain_loop

CPU = torch.device("cpu")
TABLES = ("inputs", "outputs")
FACTOR = 247213  # prime, and no divisor of any vocabulary here: id * FACTOR mod V is a permutation


class ByRow(nn.Module):
    """`LanguageModel` with its tables in one collection, which is looked up once."""

    def __init__(self, model: LanguageModel, scrambled: bool, merged: bool) -> None:
        super().__init__()
        rows, self.features = model.inputs.weight.shape
        self.rows, self.scrambled, self.merged = rows, scrambled, merged
        self.lstm, self.widen = model.lstm, model.widen
        configs = [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=self.features, feature_names=[name])
            for name in TABLES
        ]
        self.tables = EmbeddingCollection(tables=configs, device=torch.device("meta"))

    def forward(self, sentences: Tensor, negatives: Tensor) -> Tensor:
        targets = sentences[:, 1:].reshape(-1)
        inputs, rows = self.look_up(sentences[:, :-1].reshape(-1), torch.cat([targets, negatives]))
        states, _ = self.lstm(inputs.view(*sentences[:, 1:].shape, self.features))
        states = self.widen(states).reshape(-1, self.features)
        of_targets, of_negatives = rows[: len(targets)], rows[len(targets) :]
        logits = torch.cat([(states * of_targets).sum(-1, keepdim=True), states @ of_negatives.T], dim=1)
        return nn.functional.cross_entropy(logits, targets.new_zeros(len(targets)))

    def look_up(self, *ids: Tensor) -> list[Tensor]:
        """(ids, features) for each table."""
        backs = []
        if self.merged:
            ids, backs = zip(*(each.unique(return_inverse=True) for each in ids))
        values = torch.cat(ids)
        if self.scrambled:
            values = values * FACTOR % self.rows
        lengths = torch.tensor([len(each) for each in ids])
        found = self.tables(KeyedJaggedTensor(keys=list(TABLES), values=values, lengths=lengths))
        rows = [found[name].values() for name in TABLES]
        return [each[back] for each, back in zip(rows, backs)] if self.merged else rows


def train(case: Case, scrambled: bool, merged: bool) -> Step:
    start = case.model()
    model = ByRow(start, scrambled, merged)
    apply_optimizer_in_backward(case.kind, model.tables.parameters(), dict(case.options))
    sharder = EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        model.tables, {name: row_wise() for name in TABLES}, sharder, 1, dist.get_world_size(), "cpu"
    )
    model = DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"tables": plan}), sharders=[sharder])
    copy_rows(model, {name: getattr(start, name).weight for name in TABLES}, scrambled)
    dense = {name: p for name, p in model.named_parameters() if not name.startswith("tables.")}
    optimizer = KeyedOptimizerWrapper(dense, case.optimizer)
    return plain_loop(case, model, optimizer, case.batches())


def copy_rows(model: nn.Module, start: Mapping[str, Tensor], scrambled: bool) -> None:
    """Gives this rank's blocks of rows the values every contender begins with."""
    for key, value in model.state_dict().items():
        name = next((name for name in TABLES if f".{name}.weight" in key), None)
        if name is None:
            continue
        for shard in value.local_shards():
            first, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            rows = torch.arange(first, first + count)
            if scrambled:
                rows = rows * pow(FACTOR, -1, len(start[name])) % len(start[name])
            shard.tensor.detach().copy_(start[name].detach()[rows])
