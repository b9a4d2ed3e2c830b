"""A model without row-read parameters, where there is nothing to win by ownership: our dense path beside DDP's.

ResNet-18 (32 x 32 stem) on random images: the times are those of any images.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from armillary.facts.plan import Plan
from armillary.facts.topology import Link, Topology
from armillary.planning.planner import plan
from armillary.runtime.profiling.profiler import profile
from armillary.session.attach import attach
from armillary.workloads.vision import workload
from benchmarks.hybrid.peers import LEARNING_RATE, Step

MIB = 2**20


def dense(width: int, images: int, mbit_per_second: float) -> Mapping[str, Callable[[], Step]]:
    """Modes by name: alone, DDP with its default and with small buckets, ours with the planner's buckets."""
    return {
        "vision_alone": partial(_alone, width, images),
        "vision_ddp": partial(_ddp, width, images, 25),
        "vision_ddp_2mb": partial(_ddp, width, images, 2),
        "vision_ours": partial(_ours, width, images, mbit_per_second),
    }


def _model(width: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return workload(architecture="resnet18", data="digits", width=width, norm="group").model()


def _batch(images: int, model: nn.Module) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(dist.get_rank())
    channels = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
    return torch.rand(images, channels, 32, 32, generator=stream), torch.randint(10, (images,), generator=stream)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    optimizer.zero_grad()
    loss = _loss(model, batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _alone(width: int, images: int) -> Step:
    model = _model(width)
    return partial(_step, model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), _batch(images, model))


def _ddp(width: int, images: int, bucket_mib: int) -> Step:
    model = _model(width)
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
    return partial(_step, parallel, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), _batch(images, model))


def _ours(width: int, images: int, mbit_per_second: float) -> Step:
    model = _model(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    batch = _batch(images, model)
    workers = dist.get_world_size()
    link = Link(3e-4, (mbit_per_second or 8000) * 1e6 / 8)
    topology = Topology(workers, 1, link, link, 64 << 30)
    found: list[Plan | None] = [None]
    if dist.get_rank() == 0:
        found = [plan(profile(model, [batch] * workers, _loss, workers=workers), topology)]
        print(found[0], flush=True)
    dist.broadcast_object_list(found)
    assert found[0] is not None
    run = attach(found[0], model, optimizer, topology=topology)
    return partial(_keep, run, partial(_step, model, optimizer, batch))


def _keep(run: object, step: Step) -> float:
    return step()
