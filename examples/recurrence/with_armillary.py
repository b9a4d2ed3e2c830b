"""A tanh recurrence over 1,024 noisy readings forecasts the next one: all steps at once, by `solvers.recur`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary import solvers

READINGS, WIDTH, STEPS = 1024, 4, 20


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(1, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, readings: Tensor) -> Tensor:
        return self.head(solvers.recur(self.cell, readings, torch.zeros(WIDTH)))


def readings() -> Tensor:
    """(READINGS + 1, 1): two waves and noise."""
    time = torch.arange(READINGS + 1.0)[:, None]
    noise = torch.randn(READINGS + 1, 1, generator=torch.Generator().manual_seed(0))
    return torch.sin(time / 7) + torch.sin(time / 17) / 2 + noise / 10


def main(steps: int = STEPS) -> float:
    torch.manual_seed(0)
    model, series = Forecaster(), readings()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(series[:-1]), series[1:])
        loss.backward()
        optimizer.step()
    print(f"last loss {loss.item():.6f}")
    return loss.item()


if __name__ == "__main__":
    main()
