"""A small DLRM, torch's DDP: bags of ids and dense features, Adagrad, early stop."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TABLES, ROWS, WIDTH, EPOCHS, PATIENCE = 4, 1_000, 8, 6, 1
FILE = "recommender.pt"


class Dlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(WIDTH * (TABLES + 1), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        bags = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(dense), *bags], dim=1)).squeeze(1)


def clicks(count: int, seed: int) -> TensorDataset:
    """A click where dense features and how frequent the ids are say so."""
    draw = torch.Generator().manual_seed(seed)
    dense = torch.randn(count, 8, generator=draw)
    ids = (torch.rand(count, TABLES, 3, generator=draw) ** 3 * ROWS).long()
    score = dense[:, 0] + (ids < ROWS // 8).float().mean((1, 2)) * 4 - 2
    return TensorDataset(dense, ids, (score + torch.randn(count, generator=draw) > 0).float())


def main() -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Dlrm())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    training, held_out = clicks(2_048, 1), clicks(256, 2)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=32, sampler=sampler)
    held_out_loader = DataLoader(held_out, batch_size=32, sampler=DistributedSampler(held_out, shuffle=False))
    best, waited = 0.0, 0
    for epoch in range(EPOCHS):
        model.train()
        sampler.set_epoch(epoch)
        for dense, ids, clicked in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(dense, ids), clicked).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = [(model(dense, ids), clicked) for dense, ids, clicked in held_out_loader]
        everyones = [found] * dist.get_world_size()
        dist.all_gather_object(everyones, found)
        found = [pair for rank_found in everyones for pair in rank_found]
        area = roc_auc_score(torch.cat([clicked for _, clicked in found]), torch.cat([score for score, _ in found]))
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: area under the curve {area:.3f}")
        waited = 0 if area > best else waited + 1
        if area > best:
            best = area
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), FILE)
        if waited > PATIENCE:
            break
    dist.destroy_process_group()
    return best


if __name__ == "__main__":
    main()
