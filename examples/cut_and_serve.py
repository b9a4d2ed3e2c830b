"""A net learns to read digits, is cut by neurons, and answers on all ranks: torchrun --nproc-per-node 4 (this file)

It needs scikit-learn for the digits, which brings the scipy that a cut needs.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from armillary import repurpose

STEPS = 300


def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    return torch.tensor(found.data / 16).float(), torch.tensor(found.target).long()


def trained(pixels: Tensor, labels: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        some = torch.randint(len(pixels), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(pixels[some]), labels[some]).backward()
        optimizer.step()
    return model


def accuracy(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    right = sum(int((model(pixels).argmax(1) == labels).sum()) for pixels, labels in batches)
    return right / sum(len(labels) for _, labels in batches)


def main() -> float:
    """The share of test digits that the ranks read rightly, on rank 0; elsewhere 0."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    pixels, labels = digits()
    if dist.get_rank() == 0:  # once; the shards may be kept
        model = trained(pixels[:1400], labels[:1400])
        batches = list(zip(pixels[:1400].split(50), labels[:1400].split(50), strict=True))
        shards = repurpose.cut(model, workers=dist.get_world_size(), batches=batches, measure=accuracy, drop=0.01)
        print(shards)
        shards.save("shards")
    dist.barrier()
    with repurpose.serve("shards") as run:
        found = run(pixels[1400:])
    if found is None:
        return 0.0
    share = float((found.argmax(1) == labels[1400:]).float().mean())
    print(f"{share:.1%} of the digits of the test split are read rightly")
    return share


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
