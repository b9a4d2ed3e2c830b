"""A small residual network, torchrun: SGD, one-cycle rate, running statistics, averaged weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import armillary

CHANNELS, SIDE, CLASSES, EPOCHS = 16, 12, 4, 3
FILE = "resnet.pt"


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(images + self.second(self.first(images)))


def resnet() -> nn.Module:
    stem = nn.Conv2d(1, CHANNELS, 3, padding=1)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES))
    return nn.Sequential(stem, Block(CHANNELS), Block(CHANNELS), head)


def images(count: int, seed: int) -> TensorDataset:
    """Noise with stripes; the class is how many."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (count,), generator=draw)
    waves = torch.sin(torch.arange(SIDE) * (label[:, None] + 1) * torch.pi / SIDE)
    noise = torch.randn(count, 1, SIDE, SIDE, generator=draw)
    return TensorDataset(noise + waves[:, None, None, :].expand(count, 1, SIDE, SIDE), label)


def right(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    return {"right": int((model(batch[0]).argmax(1) == batch[1]).sum())}


def main() -> float:
    torch.manual_seed(0)
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    run = armillary.parallelize(model, optimizer)
    training, held_out = images(512, 1), images(128, 2)
    loader = run.shard(DataLoader(training, batch_size=16, shuffle=True))
    held_out_loader = run.shard(DataLoader(held_out, batch_size=16), drop_last=False)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=EPOCHS, steps_per_epoch=len(loader))
    average = run.ema(0.95)
    accuracy = 0.0
    for epoch in range(EPOCHS):
        model.train()
        for batch, label in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), label).backward()
            optimizer.step()
            scheduler.step()
            average.update()
        with average.shown():
            accuracy = run.evaluate(held_out_loader, right)["right"] / len(held_out)
        if run.rank == 0:
            print(f"epoch {epoch}: accuracy of the averaged weights {accuracy:.3f}")
    state = average.export()
    if run.rank == 0:
        torch.save(state, FILE)
    run.close()
    return accuracy


if __name__ == "__main__":
    main()
