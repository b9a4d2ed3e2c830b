"""What every rank does for one cell: torch's modes and every mesh by turns, three rounds. Rank 0 prints the record."""

import argparse
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import armillary
from armillary import tensor
from benchmarks.measuring.record import machine
from benchmarks.mesh.models import CASES, SMALL, Case, loss

COLUMNS_ROWS = {
    **{name: ColwiseParallel() for name in ("q", "k", "v", "up")},
    **{name: RowwiseParallel() for name in ("o", "down")},
}
BUDGETS = {"a quarter": 1 / 4, "a half": 1 / 2}  # of what DDP is foreseen to hold; the first that any mesh fits
FEW = ("torch DDP", "torch 1D (data 1,", "columns_rows (tensor", "2.5d (depth")


@dataclass(frozen=True)
class Mode:
    """A model ready to train, its optimizer, and this rank's samples."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]
    close: Callable[[], None] = lambda: None  # groups wake threads for as long as they are open

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss(self.model, self.batch).backward()
        self.optimizer.step()


Make = Callable[[], Mode]


def share(case: Case, rank: int, many: int) -> tuple[Tensor, Tensor]:
    x, y = case.batch()
    return x.chunk(many)[rank], y.chunk(many)[rank]


def ready(model: nn.Module, inner: nn.Module, batch: tuple[Tensor, Tensor]) -> Mode:
    return Mode(model, torch.optim.AdamW(inner.parameters()), batch)


def with_fsdp(model: Any, mesh: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@cache
def mesh_of(data: int, many: int) -> Any:
    """Kept open: DTensor remembers meshes, and takes one for another of its shape."""
    return init_device_mesh("cpu", (data, many), mesh_dim_names=("data", "tensor"))


def torchs(case: Case, data: int, many: int, is_fsdp: bool) -> Mode:
    """Torch alone: data parallelism by DDP or FSDP2, tensor parallelism by parallelize_module."""
    mesh = mesh_of(data, many)
    model: Any = case.model()
    if many > 1:
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], COLUMNS_ROWS)
    inner, mine = model, share(case, mesh.get_local_rank("data"), data)
    if is_fsdp:
        with_fsdp(model, mesh["data"])
    elif data > 1 and many > 1:
        group = mesh["data"].get_group()
        for parameter in model.parameters():  # DDP takes no DTensor; the same sums, each when its gradient is there
            parameter.register_post_accumulate_grad_hook(lambda one: mean_over(group, one.grad))
    elif data > 1:
        model = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    return ready(model, inner, mine)


def mean_over(group: Any, gradient: Tensor) -> None:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    dist.all_reduce(local, group=group)
    local /= dist.get_world_size(group)


def ours(case: Case, plan: tensor.MeshPlan) -> Mode:
    part = tensor.cut(case.model(), plan)
    model, mine = part.model, share(case, part.data_rank, part.replicas)
    if plan.fsdp:
        with_fsdp(model, part.mesh["data"])
    elif part.replicas > 1:
        model = DistributedDataParallel(model, process_group=part.data_group)
    mode = ready(model, part.model, mine)
    return mode if plan.fsdp else replace(mode, close=part.close)


def modes(case: Case, plan: tensor.MeshPlan, taken: Collection[str]) -> Iterator[tuple[str, Make]]:
    """taken: names of meshes; of ours with FSDP2, they alone."""
    many = dist.get_world_size()
    yield "torch DDP", lambda: torchs(case, many, 1, False)
    yield "torch FSDP2", lambda: torchs(case, many, 1, True)
    for data in range(1, many):
        if many % data == 0:
            yield f"torch 1D (data {data}, tensor {many // data})", lambda d=data: torchs(case, d, many // d, False)
            if data > 1:
                yield (
                    f"torch 1D x FSDP2 (data {data}, tensor {many // data})",
                    lambda d=data: torchs(case, d, many // d, True),
                )
    for price in plan.prices:
        if price.way != "data" and (not price.fsdp or named(price) in taken):
            yield named(price), lambda one=price: ours(case, plan.choosing(one.way, one.mesh, fsdp=one.fsdp))


def named(one: Any) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in one.mesh.items() if size > 1)
    if one.way == "data":
        return "torch FSDP2" if one.fsdp else "torch DDP"
    return f"{one.way} ({sizes}){' with FSDP2' if one.fsdp else ''}"


def held(mode: Mode) -> int:
    """Bytes of a step: local weights, gradients, two slots of Adam, and what autograd keeps of the forward."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in mode.model.parameters()]
    seen = {one.untyped_storage()._cdata for one in local}
    kept = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal kept
        one = x.to_local() if isinstance(x, DTensor) else x
        if not isinstance(x, nn.Parameter) and (key := one.untyped_storage()._cdata) not in seen:
            seen.add(key)
            kept += one.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = loss(mode.model, mode.batch)
    found.backward()
    return kept + 4 * sum(one.nbytes for one in local)


def timed(make: Make, steps: int) -> Mapping[str, Any]:
    """Seconds a step, barrier to barrier, and bytes of the rank that holds most."""
    mode = make()
    most = torch.tensor([held(mode)])  # a forward and backward, which warms up
    mode.optimizer.step()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    began = time.perf_counter()
    for _ in range(steps):
        mode.step()
    dist.barrier()
    seconds = (time.perf_counter() - began) / steps
    mode.close()
    return {"seconds": seconds, "held": int(most)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--few", action="store_true", help="of all meshes, those that the bar is about, and DDP")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    case = SMALL if options.small else CASES[options.case]
    topology = armillary.measure()
    plans = {"fits": tensor.plan(case.model(), case.batch(), loss, region="blocks", topology=topology)}
    whole = next(one.held_bytes for one in plans["fits"].prices if one.way == "data" and not one.fsdp)
    for budget, share_of_it in BUDGETS.items():
        if len(plans) == 1 and any(one.held_bytes <= whole * share_of_it for one in plans["fits"].prices):
            limit = int(whole * share_of_it)
            plans[budget] = tensor.plan(
                case.model(), case.batch(), loss, region="blocks", topology=topology, memory_bytes=limit
            )
    found: dict[str, list[Mapping[str, Any]]] = {}
    ready_modes = dict(modes(case, plans["fits"], {named(one) for one in plans.values()}))
    if options.few:
        ready_modes = {name: make for name, make in ready_modes.items() if name.startswith(FEW)}
    for turn in range(options.rounds):
        names = list(ready_modes)
        for name in names[turn:] + names[:turn]:
            found.setdefault(name, []).append(timed(ready_modes[name], options.steps))
    if dist.get_rank() == 0:
        record = {
            "machine": machine(),
            "ranks": dist.get_world_size(),
            "seconds": {name: [one["seconds"] for one in rounds] for name, rounds in found.items()},
            "held": {name: rounds[0]["held"] for name, rounds in found.items()},
            "taken": {budget: named(one) for budget, one in plans.items()},
            "forecast": {named(one): one.seconds for one in plans["fits"].prices},
            "forecast_held": {named(one): one.held_bytes for one in plans["fits"].prices},
        }
        print("RECORD " + json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
