"""What every rank runs: requests one behind the other, by each contender in turn. Rank 0 writes seconds a request."""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from armillary import repurpose
from benchmarks.repurpose.nets import trained

AS_ONE = 1e-3  # of the largest output: no contender may give another answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", required=True)
    parser.add_argument("--shards", type=Path, required=True, help="a folder of folders, one a contender")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x = torch.rand(options.batch, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with ExitStack() as held:
        contenders: dict[str, Callable[[Tensor], Any]] = {}
        for folder in sorted(options.shards.iterdir()):
            contenders[folder.name] = held.enter_context(repurpose.serve(folder, timeout_seconds=300))
            _judge(contenders[folder.name](x), repurpose.Shards.load(folder).model(), x)
        if options.net == "mlp":
            for name, style in (("torch, colwise and gather", _gathered), ("torch, colwise and rowwise", _paired)):
                model = trained("mlp", 0, options.small)
                contenders[name] = _of_torch(parallelize_module(model, init_device_mesh("cpu", (4,)), style()))
                _judge(contenders[name](x), trained("mlp", 0, options.small), x)
        blocks: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(options.rounds):
            names = list(contenders)
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                blocks[name].append(_block(contenders[name], x, options.warm, options.requests))
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(blocks))
    dist.barrier()
    dist.destroy_process_group()


def _block(contender: Callable[[Tensor], Any], x: Tensor, warm: int, requests: int) -> float:
    """Seconds a request. What warms up also empties the buckets that links let pass at once."""
    dist.barrier()
    for _ in range(warm):
        contender(x)
    began = time.perf_counter()
    for _ in range(requests):
        contender(x)
    dist.barrier()
    return (time.perf_counter() - began) / requests


def _of_torch(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Rank 0 has the request, the others are sent it."""

    @torch.no_grad()
    def run(x: Tensor) -> Tensor:
        x = x.clone() if dist.get_rank() == 0 else torch.empty_like(x)
        dist.broadcast(x, 0)
        found: Tensor = model(x)
        return found

    return run


def _gathered() -> dict[str, Any]:
    """All layers but the last: each host a quarter of the neurons, gathered behind each layer."""
    return {name: ColwiseParallel(output_layouts=Replicate()) for name in ("1", "3", "5", "7")}


def _paired() -> dict[str, Any]:
    """Layers in pairs, with one all-reduce a pair; the last is small, and computed by everyone."""
    return {"1": ColwiseParallel(), "3": RowwiseParallel(), "5": ColwiseParallel(), "7": RowwiseParallel()}


def _judge(found: Any, model: nn.Module, x: Tensor) -> None:
    if dist.get_rank() == 0:
        with torch.no_grad():
            want = model(x)
        assert float((found - want).abs().max()) <= AS_ONE * float(want.abs().max()), "another answer"


if __name__ == "__main__":
    main()
