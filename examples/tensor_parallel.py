"""A transformer learns to sort digits, cut over a mesh of ranks: torchrun --nproc-per-node 4 (this file)

Every mesh is printed with its price. So small a model is trained fastest by data parallelism, and the plan says so;
here two ranks share a replica all the same.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import armillary
from armillary import tensor

DIGITS, LENGTH, WIDE, STEPS = 10, 6, 32, 150


def sorter() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDE, 4, 4 * WIDE, dropout=0.0, batch_first=True)
    blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(DIGITS, WIDE), Places(), blocks, nn.Linear(WIDE, DIGITS))


class Places(nn.Module):
    """Tells the digits of a sequence apart."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(LENGTH, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.place


def digits(step: int, samples: int = 64) -> Tensor:
    return torch.randint(DIGITS, (samples, LENGTH), generator=torch.Generator().manual_seed(step))


def loss(model: nn.Module, given: Tensor) -> Tensor:
    return F.cross_entropy(model(given).flatten(0, 1), given.sort(1).values.flatten())


def main() -> float:
    """The share of digits that the trained model puts in their place, in one process on rank 0; elsewhere 0."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = sorter()
    plan = tensor.plan(model, digits(0), loss, region="2.layers", topology=armillary.measure())
    plan = plan.choosing("columns_rows", {"data": dist.get_world_size() // 2, "tensor": 2})
    part = tensor.cut(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with armillary.parallelize(model, optimizer, process_group=part.data_group):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, digits(step).chunk(part.replicas)[part.data_rank]).backward()
            part.clip_grad_norm_(1.0)
            optimizer.step()
    state = part.whole_state(optimizer)  # as one process would have it
    if state is None:
        return 0.0
    torch.save(state, "sorter.pt")
    plain = sorter()
    plain.load_state_dict(state["model"])
    given = digits(STEPS)
    share = float((plain(given).argmax(-1) == given.sort(1).values).float().mean())
    print(f"{share:.1%} of the digits of new sequences are put in their place")
    return share


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
