"""Trains a next-frame model on a wake while it is computed; draws flow, prediction and loss. Starts the solver itself.

usage: python examples/in_situ/train.py [STEPS]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from armillary import feeds

SOLVER = Path(__file__).with_name("wake.py")
PICTURE = "in_situ.png"
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class NextFrame(nn.Module):
    """What changes until the next frame, by three convolutions."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.Conv2d(2, channels, 5, padding=2, padding_mode="replicate"), nn.GELU(),
            nn.Conv2d(channels, channels, 5, padding=2, padding_mode="replicate"), nn.GELU(),
            nn.Conv2d(channels, 2, 5, padding=2, padding_mode="replicate"),
        )  # fmt: skip

    def forward(self, now: Tensor) -> Tensor:
        return now + self.change(now)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of the change from frame to frame: 1 is a model that says nothing changes."""
    change = batch["next"] - batch["now"]
    return (model(batch["now"]) - batch["next"]).square().mean() / change.square().mean()


def draw(losses: list[float], now: Tensor, predicted: Tensor, true: Tensor) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(11, 6), layout="constrained")
    shown = {"flow now, across": now, "next, predicted": predicted, "next, computed": true}
    for axis, (title, frame) in zip(axes.flat, shown.items(), strict=False):
        axis.imshow(frame[1].numpy().T, origin="lower", cmap="RdBu", vmin=-0.8, vmax=0.8)
        axis.set_title(title)
    axes[1, 1].semilogy(losses)
    axes[1, 1].set(title="loss; 1: nothing changes", xlabel="batch")
    figure.savefig(PICTURE)
    plt.close(figure)


def main(steps: int = 300) -> list[float]:
    torch.manual_seed(0)
    model = NextFrame()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses: list[float] = []
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        store = f"{folder}/wake"
        solver = subprocess.Popen([sys.executable, str(SOLVER), store, str(steps)])
        with feeds.Stream(store, window=feeds.Reservoir(256), batch=4, fresh=1) as stream:
            for batch in stream:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if len(losses) % 50 == 0:
                    print(f"batch {len(losses)}: step {max(id.step for id in stream.ids)}, loss {losses[-1]:.3f}")
        solver.wait()
    with torch.no_grad():
        draw(losses, batch["now"][0], model(batch["now"])[0], batch["next"][0])
    print(f"{len(losses)} batches, loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; drawn in {PICTURE}")
    return losses


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
