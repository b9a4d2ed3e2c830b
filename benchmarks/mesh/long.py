"""Activations of 8,192 tokens: one rank with the plain model, and each of four ranks with tokens cut. Prints them."""

import json

import torch
import torch.distributed as dist
from torch import nn

from armillary import tensor
from armillary.models.preserved_state import LiveBytes
from benchmarks.mesh.models import Block

WIDE, HEADS, BLOCKS, TOKENS = 32, 4, 4, 8192


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDE, HEADS) for _ in range(BLOCKS)))


def most_bytes(model: nn.Module, tokens: int) -> int:
    """The most there were of a forward and backward; weights and gradients are there before."""
    x = torch.randn(1, tokens, WIDE, generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    live = LiveBytes()
    with live:
        live.mark()
        model(x).square().mean().backward()
    return live.added_bytes


def main(tokens: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"one rank": most_bytes(blocks(), tokens)} if dist.get_rank() == 0 else {}
    dist.barrier()
    for way in ("heads", "ring"):
        part = tensor.cut(blocks(), region="", way=way, mesh={"sequence": dist.get_world_size()})
        mine = torch.tensor([most_bytes(part.model, tokens)])
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        found[way] = int(mine)
    if dist.get_rank() == 0:
        print("RECORD " + json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]) if len(sys.argv) > 1 else TOKENS)
