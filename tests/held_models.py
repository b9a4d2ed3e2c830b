"""Small models of six stages, and three steps of one, with its gradients, buffers and weights after each."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from armillary import residency

STEPS = 3


class Attending(nn.Module):
    """A transformer block, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mixed, self.out, self.drop = nn.Linear(32, 96), nn.Linear(32, 32), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.first(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.second(x)))))


def convolving() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1)
    )  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model's stages and the shape of its batch. dtype: of weights; is_autocast: computes in bfloat16."""

    stage: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_autocast: bool = False

    def model(self, count: int = 6) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[self.stage() for _ in range(count)]).to(self.dtype)

    def batch(self, step: int, rank: int = 0) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(10 * step + rank)).to(self.dtype)

    def loss(self, model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.is_autocast):
            return model(batch).float().square().mean()


TRANSFORMER = Kind(Attending, (4, 64, 32))
CONVOLUTION = Kind(convolving, (8, 8, 24, 24))
KINDS = {
    "transformer": TRANSFORMER,
    "transformer, float64": replace(TRANSFORMER, dtype=torch.float64),
    "transformer, autocast": replace(TRANSFORMER, is_autocast=True),
    "convolution": CONVOLUTION,
    "convolution, float64": replace(CONVOLUTION, dtype=torch.float64),
    "convolution, autocast": replace(CONVOLUTION, is_autocast=True),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


def steps(
    kind: Kind, model: nn.Module, optimizer: torch.optim.Optimizer, held: residency.Held | None = None, rank: int = 0
) -> dict[str, Tensor]:
    """What STEPS steps leave: gradients and buffers of each, weights at the end."""
    found: dict[str, Tensor] = {}
    with held or nullcontext():
        for step in range(STEPS):
            torch.manual_seed(step)
            optimizer.zero_grad()
            kind.loss(model, kind.batch(step, rank)).backward()
            found |= {f"gradient {n} of step {step}": p.grad.clone() for n, p in model.named_parameters()}
            found |= {f"buffer {n} of step {step}": b.clone() for n, b in model.named_buffers()}
            optimizer.step()
    return found | {n: p.detach().clone() for n, p in model.named_parameters()}


def held_by(
    plan: residency.ResidencyPlan, residencies: Sequence[str], slots: int, model: nn.Module, tier: object, **more: Any
) -> residency.Held:
    """The model held to these residencies instead of the plan's."""
    forced = replace(plan, residencies=tuple(residencies), slots=slots)
    return residency.hold(model, [], lambda model, batch: model(batch), plan=forced, tier=tier, **more)


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of what is not equal in every bit."""
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])]
