"""TorchRec on the recommender: both tables in one EmbeddingBagCollection, split into blocks of rows.

On a CPU TorchRec offers no row_wise for bags, though it runs; a sharder that says so is all it needs. Rows are summed
by their owners, so repeats never travel, and ids are hashed, so blocks are balanced: nothing is left to do by hand.
Departure: fbgemm wants widths that 4 divides, so the wide table has 3 more columns, of zeros that nothing moves.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.optim.keyed import KeyedOptimizerWrapper

from armillary.workloads.ratings import BAGS
from armillary.workloads.recommender import WideAndDeep
from benchmarks.peers.case import Case, Step, plain_loop

CPU = torch.device("cpu")
NARROWEST = 4
TABLES = ("wide", "deep")


class RowWise(EmbeddingBagCollectionSharder):
    """Offers what it does not offer on a CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.ROW_WISE.value]


class InBags(nn.Module):
    """`WideAndDeep` with its tables in one collection."""

    def __init__(self, model: WideAndDeep) -> None:
        super().__init__()
        rows, self.width = model.deep.weight.shape
        self.perceptron, self.head = model.perceptron, model.head
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=width, feature_names=["features"])
            for name, width in zip(TABLES, (NARROWEST, self.width))
        ]
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        ends = torch.cat([offsets, torch.tensor([len(ids)])])
        found = self.tables(KeyedJaggedTensor(keys=["features"], values=ids, offsets=ends)).values()
        wide = found[:, 0].view(-1, BAGS).sum(1)
        deep = self.head(self.perceptron(found[:, NARROWEST:].reshape(-1, BAGS * self.width))).squeeze(1)
        return wide + deep


def train(case: Case) -> Step:
    start = case.model()
    model = InBags(start)
    fused = {"lr": case.options["lr"], "eps": case.options["eps"]}
    apply_optimizer_in_backward(case.kind, model.tables.parameters(), fused)
    sharder = RowWise()
    plan = construct_module_sharding_plan(
        model.tables, {name: row_wise() for name in TABLES}, sharder, 1, dist.get_world_size(), "cpu"
    )
    model = DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"tables": plan}), sharders=[sharder])
    for state in model.fused_optimizer.state.values():
        for name, value in state.items():
            if name.endswith("momentum1"):
                value.local_shards()[0].tensor.fill_(case.options["initial_accumulator_value"])
    copy_rows(model, start)
    dense = {name: p for name, p in model.named_parameters() if not name.startswith("tables.")}
    optimizer = KeyedOptimizerWrapper(dense, case.optimizer)
    return plain_loop(case, model, optimizer, case.batches())


def copy_rows(model: nn.Module, start: WideAndDeep) -> None:
    """Gives this rank's blocks of rows the values every contender begins with."""
    for key, value in model.state_dict().items():
        name = next((name for name in TABLES if f".{name}.weight" in key), None)
        if name is None:
            continue
        rows = getattr(start, name).weight.detach()
        for shard in value.local_shards():
            first, count = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.detach().zero_()[:, : rows.shape[1]] = rows[first : first + count]
