"""A small residual network, one process: SGD, one-cycle rate, running statistics, averaged weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

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


def main() -> float:
    torch.manual_seed(0)
    model = resnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    training, held_out = images(512, 1), images(128, 2)
    loader = DataLoader(training, batch_size=16, shuffle=True)
    held_out_loader = DataLoader(held_out, batch_size=16)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=EPOCHS, steps_per_epoch=len(loader))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    accuracy = 0.0
    for epoch in range(EPOCHS):
        model.train()
        for batch, label in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), label).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            right = sum(int((average(batch).argmax(1) == label).sum()) for batch, label in held_out_loader)
        accuracy = right / len(held_out)
        print(f"epoch {epoch}: accuracy of the averaged weights {accuracy:.3f}")
    torch.save(average.module.state_dict(), FILE)
    return accuracy


if __name__ == "__main__":
    main()
