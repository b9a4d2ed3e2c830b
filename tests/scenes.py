"""A model that reads tables in every supported way, per-worker batches for it, and a plan: what exactness tests
train."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from armillary.exchanges import row_exchanges
from armillary.plans import Choice, Group, Mesh, Plan, model_fingerprint

V, D = 23, 4
TABLES = ("soft", "bias", "shared.weight", "bag.weight", "emb.weight")


class Mixed(nn.Module):
    """emb: nn.Embedding with padding; bag: EmbeddingBag; shared: one table for two features; soft and bias: sampled
    output.

    `rare` is used only where the batch says so, `never` in no step, `frozen` gets no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(V, D, padding_idx=0)
        self.bag = nn.EmbeddingBag(V, D, mode="sum")
        self.shared = nn.Embedding(V, D)
        self.soft = nn.Parameter(torch.randn(V, D))
        self.bias = nn.Parameter(torch.randn(V))
        self.lin = nn.Linear(D, D)
        self.rare = nn.Parameter(torch.ones(D))
        self.never = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(D), requires_grad=False)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        ids = batch["ids"]
        hidden = self.emb(ids) * self.frozen
        if batch["reads_bag"]:
            weights = batch["bag_weights"].to(hidden.dtype)
            hidden = hidden + self.bag(batch["bag"], batch["offsets"], per_sample_weights=weights)
        hidden = hidden + self.shared(ids) * self.shared(batch["other"])
        if batch["uses_rare"]:
            hidden = hidden * self.rare
        hidden = torch.tanh(self.lin(hidden))
        scores = hidden @ self.soft[batch["sampled"]].T + self.bias.index_select(0, batch["sampled"])
        return functional.cross_entropy(scores, batch["target"])


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    value: Tensor = model(batch)
    return value


def batch_of(
    worker: int, step: int, size: int = 6, only_padding: bool = False, reads_bag: bool = True
) -> dict[str, Any]:
    """Skewed ids with repeats; `uses_rare` on worker 0 at odd steps only."""
    generator = torch.Generator().manual_seed(1000 * step + worker)

    def skewed(n: int) -> Tensor:
        return (torch.rand(n, generator=generator) ** 3 * V).long()

    ids, bag = skewed(size), skewed(2 * size)
    return {
        "ids": torch.zeros_like(ids) if only_padding else ids,
        "other": skewed(size),
        "bag": bag,
        "offsets": torch.arange(0, 2 * size, 2),
        "bag_weights": torch.rand(2 * size, generator=generator),
        "sampled": skewed(5).unique(),
        "target": torch.zeros(size, dtype=torch.int64),
        "uses_rare": worker == 0 and step % 2 == 1,
        "reads_bag": reads_bag,
    }


def plan_for(model: nn.Module, workers: int, rows: Choice, dense: Choice, **fields: Any) -> Plan:
    """Every table by `rows` (or, if that is no row exchange, with the dense ones), the rest by `dense` in two
    buckets."""
    departures = fields.pop("departures", ())
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    entry = row_exchanges().get(rows.name)
    groups: list[Group] = []
    rest = [name for name in named if entry is None or name not in TABLES]
    half = len(rest) // 2
    groups.append(Group("late", tuple(rest[half:]), "replicated", dense))
    if entry is not None:
        layout = entry.make(**rows.options).placement
        groups += [Group(name, (name,), layout, rows, departures=departures) for name in TABLES if name in named]
    groups.append(Group("early", tuple(rest[:half]), "replicated", dense))
    listing = [(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named.items()]
    return Plan(Mesh.of(data=workers), tuple(groups), model_fingerprint(listing), **fields)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd_fused": lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True),
    "momentum_decay": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.1),
    "adagrad_decay": lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adam_foreach": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True),
    "adam_fused": lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True),
    "adamw_groups": lambda ps: torch.optim.AdamW(_halves(list(ps)), lr=0.01),
}


def _halves(parameters: list[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[::2], "lr": 0.02, "weight_decay": 0.1},
        {"params": parameters[1::2]},
    ]
