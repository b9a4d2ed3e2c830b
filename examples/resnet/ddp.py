"""A small residual network, torch's DDP: SGD, one-cycle rate, running statistics, averaged weights."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(resnet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    training, held_out = images(512, 1), images(128, 2)
    sampler = DistributedSampler(training)
    loader = DataLoader(training, batch_size=16, sampler=sampler)
    held_out_loader = DataLoader(held_out, batch_size=16, sampler=DistributedSampler(held_out, shuffle=False))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=EPOCHS, steps_per_epoch=len(loader))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    accuracy = 0.0
    for epoch in range(EPOCHS):
        model.train()
        sampler.set_epoch(epoch)
        for batch, label in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), label).backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model.module)
        average.eval()
        with torch.no_grad():
            right = sum((average(batch).argmax(1) == label).sum() for batch, label in held_out_loader)
        dist.all_reduce(right)
        accuracy = int(right) / len(held_out)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy of the averaged weights {accuracy:.3f}")
    if dist.get_rank() == 0:
        torch.save(average.module.state_dict(), FILE)
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
