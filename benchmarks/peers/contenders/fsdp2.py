"""FSDP2: every child of the model with parameters is sharded by itself, then what is left."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.case import Case, Step, plain_loop


def train(case: Case) -> Step:
    model = case.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = case.unfused_optimizer(model.parameters())
    return plain_loop(case, model, optimizer, case.batches())
