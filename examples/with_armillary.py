"""`plain.py` on several workers; the marked lines are all that differs.

torchrun --nproc-per-node 2 examples/with_armillary.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import armillary  # added

VOCABULARY, WIDTH, STEPS = 5_000, 16, 20


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, words: Tensor) -> Tensor:
        return self.layers(self.table(words).mean(1))


def batches() -> list[tuple[Tensor, Tensor]]:
    """Twice STEPS batches of 16 documents of 8 words; the label is whether rare words outnumber frequent ones."""
    draw = torch.Generator().manual_seed(0)
    words = (torch.rand(2 * STEPS, 16, 8, generator=draw) ** 3 * VOCABULARY).long()
    return [(some, (some > VOCABULARY // 8).float().mean(1).round().long()) for some in words]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    words, labels = batch
    return F.cross_entropy(model(words), labels)


def main() -> float:
    torch.manual_seed(0)
    model = BagOfWords()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    run = armillary.parallelize(model, optimizer, batches()[:8], loss_of)  # added
    for batch in run.shard(batches()):  # changed: this worker's share
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    print(f"last loss {loss.item():.6f}")
    run.close()  # added: leave together, with the model whole again
    return loss.item()


if __name__ == "__main__":
    main()
