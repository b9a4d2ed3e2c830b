"""What tensor parallelism says of itself for `advise`: a region that can be cut, and every mesh of the ranks, priced.

The same dry runs as `tensor.plan`, in one process: nothing is sent, and ranks are taken to be as quick as this one.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from armillary.plans.advice import Advice, Combination, Situation, advises, not_for
from armillary.plans.group import Forecast
from armillary.tensor.cut import examined
from armillary.tensor.inventory import looked_at, samples_of, share_of
from armillary.tensor.mesh_plan import MeshPlan, MeshPrice
from armillary.tensor.plan import LossStep, all_priced, cheapest_fitting
from armillary.tensor.price import StepAsked

__all__: list[str] = []

PASSES = 20  # that looking at a region and pricing its meshes take about
ALIKE = 0.02


@advises("Colossal-AI", "blocks cut over a mesh: tensor, sequence", "methods/tensor.md")
def _advice(situation: Situation) -> Advice:
    if situation.workers == 1:
        return not_for("one worker: nothing to cut over")
    region = next(_regions(situation.model), None)
    if region is None:
        return not_for("no chain of blocks whose linear layers it knows by name; give roles=")
    batch = _joined(list(situation.batches[: situation.workers]))
    if batch is None:
        return not_for("batches cannot be joined along the samples: their tensors differ in shape")
    script = _script(situation, region, "columns_rows", {"tensor": situation.workers})
    if not situation.affords(PASSES * situation.compute_seconds):
        return Advice(True, f"region {region!r}", python=script, tells="--measure")
    try:
        made = _priced(situation, region, batch)
    except (ValueError, RuntimeError) as error:
        return not_for(str(error))
    taken = next(one for one in made.prices if one.name == made.name)
    if taken.way == "data":
        taken = next((one for one in made.prices if one.way != "data"), taken)
    if taken.way == "data":
        return not_for(next(iter(made.left_out.values()), "no mesh of these ranks cuts the region"))
    made = made.choosing(taken.way, taken.mesh, fsdp=taken.fsdp)
    mesh = {name: size for name, size in taken.mesh.items() if size > 1}
    return Advice(
        True,
        taken.name,
        Forecast(taken.sent_bytes, taken.held_bytes, taken.seconds),
        python=_script(situation, region, taken.way, mesh, fsdp=taken.fsdp),
        source=made,
        combinations=_with_tables(situation, region, made.prices),
    )


def _priced(situation: Situation, region: str, batch: Any) -> MeshPlan:
    """As `tensor.plan` does on rank 0."""
    model, loss, many = situation.model, situation.loss, situation.workers
    samples = samples_of(batch)
    found = examined(model, region, "columns_rows", {"tensor": 1}, {})
    seen = looked_at(model, found.chain, share_of(batch, max(1, samples // many)), loss, found.rows_dim)
    asked = StepAsked(samples, situation.topology, round(situation.optimizer_slots))
    prices, left_out = all_priced(model, found, LossStep(batch, loss), {}, seen, asked, many)
    memory_bytes = situation.topology.memory_bytes
    made = MeshPlan(region, "data", {"data": many}, False, {}, samples, memory_bytes, prices, seen, left_out)
    try:
        taken = cheapest_fitting(made, ALIKE)
    except ValueError:  # nothing fits: what holds least
        if not prices:
            raise
        taken = min(prices, key=lambda one: one.held_bytes)
    return made.choosing(taken.way, taken.mesh, fsdp=taken.fsdp)


def _regions(model: nn.Module) -> Iterator[str]:
    """Paths of chains that can be cut: those with attention first, the outermost first."""
    found = list[tuple[bool, str]]()
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) == 0:
            continue
        linears = [one for one in module.modules() if type(one) is nn.Linear]
        blocks = [one for one in module if any(type(inner) is nn.Linear for inner in one.modules())]
        if not linears or len(blocks) < len(module) or any(isinstance(one, nn.Linear) for one in module):
            continue
        try:
            examined(model, path, "columns_rows", {"tensor": 1}, {})
        except (ValueError, AttributeError):
            continue
        has_attention = any(isinstance(one, nn.MultiheadAttention) for one in module.modules())
        found.append((not has_attention, path))
    yield from (path for _, path in sorted(found, key=lambda one: one[0]))


def _joined(batches: list[Any]) -> Any:
    """One batch of all ranks together."""
    leaves, shape = zip(*map(tree_flatten, batches), strict=True)
    if any(not isinstance(one, Tensor) or not one.dim() for one in leaves[0]):
        return None
    try:
        return tree_unflatten([torch.cat(those) for those in zip(*leaves, strict=True)], shape[0])
    except (RuntimeError, ValueError):
        return None


def _script(situation: Situation, region: str, way: str, mesh: dict[str, int], fsdp: bool = False) -> str:
    """With the mean over replicas where there are several."""
    averaged = ["from torch.nn.parallel import DistributedDataParallel as DDP"]
    averaged += ["part.model = DDP(part.model, process_group=part.data_group)"]
    if fsdp:
        averaged = ["from torch.distributed.fsdp import fully_shard", "fully_shard(part.model, mesh=part.mesh['data'])"]
    return situation.script(
        "from armillary import tensor  # under torchrun",
        *_cut(region, way, mesh),
        *(averaged if mesh.get("data", 1) > 1 else []),
        "optimizer = torch.optim.AdamW(part.model.parameters())",
        "loss(part.model, batches[part.data_rank]).backward(), optimizer.step()",
    )


def _cut(region: str, way: str, mesh: dict[str, int]) -> tuple[str, ...]:
    return (
        "torch.distributed.is_initialized() or torch.distributed.init_process_group('gloo')",
        f"part = tensor.cut(model, region={region!r}, way={way!r}, mesh={mesh})",
    )


def _with_tables(situation: Situation, region: str, prices: Iterable[MeshPrice]) -> tuple[Combination, ...]:
    """The cheapest mesh with a data axis, over which tables outside the region go by row. What that takes, nobody
    prices: the planner knows no ranks that hold pieces."""
    tables = [fact.name for fact in situation.profile.parameters if fact.requires_grad and fact.shardable]
    if not any(not name.startswith(f"{region}.") for name in tables):
        return ()
    for one in prices:
        if one.way != "data" and one.mesh["data"] > 1:
            mesh = {name: size for name, size in one.mesh.items() if size > 1}
            python = situation.script(
                "from armillary import parallelize, tensor  # under torchrun",
                *_cut(region, one.way, mesh),
                "run = parallelize(part.model, optimizer := torch.optim.AdamW(part.model.parameters()), "
                "process_group=part.data_group)",
                "for batch in batches[part.data_rank :: part.replicas]: loss(part.model, batch).backward(), "
                "optimizer.step(), optimizer.zero_grad()",
            )
            return (Combination(f"{one.way} + tables by row", None, python=python, tells="the script"),)
    return ()
