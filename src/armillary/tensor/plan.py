"""Chooses way and mesh by price: every factorisation of the ranks, with FSDP2 on the data axis or without."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from armillary.plans.topology import Topology
from armillary.tensor.cut import Examined, examined
from armillary.tensor.dry_run import FakeCalls, dry_run, fake_calls
from armillary.tensor.groups import by_rank_0, is_rank_0, ranks, shared
from armillary.tensor.inventory import Inventory, looked_at, samples_of, share_of, slowest
from armillary.tensor.mesh_plan import MeshPlan, MeshPrice, named
from armillary.tensor.price import StepAsked, priced
from armillary.tensor.ways import WAYS

__all__ = ["LossStep", "all_priced", "cheapest_fitting", "plan"]

Loss = Callable[[nn.Module, Any], Tensor]


class LossStep(NamedTuple):
    """What is passed: the batch of a whole step, and loss(model, batch) -> scalar."""

    batch: Any
    loss: Loss


ALIKE, MOST_ALIKE = 0.02, 0.05  # prices within as much are one price, or within the links' scatter up to the second


def plan(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    region: str,
    topology: Topology,
    memory_bytes: int | None = None,
    optimizer_slots: int = 2,
    roles: Mapping[str, str] | None = None,
) -> MeshPlan:
    """Looks at the model, prices every mesh of the job's ranks, prints them, and takes the cheapest that fits. Every
    rank calls it with the same model and batch, and gets the same plan; model and gradients stay as they were.

    Args:
        batch: of a whole step, all ranks together: tensors whose first dimension are samples. A few of them are passed
            through the model and timed, as many as each rank gets under data parallelism. Rank 0 also makes a forward
            for each size of the data axis, of which nothing is kept.
        loss: loss(model, batch) -> scalar mean.
        region, roles: as in `cut`.
        topology: what `armillary.measure()` found.
        memory_bytes: that a rank may hold; None: no limit.
        optimizer_slots: numbers that the optimizer keeps for each parameter; 2 is Adam's.

    Raises:
        ValueError: nothing can be cut, or nothing fits.
    """
    many, roles = ranks(), dict(roles or {})
    if topology.workers != many:
        raise ValueError(f"tensor.plan: the topology has {topology.workers} ranks, the job {many}; measure again")
    samples = samples_of(batch)
    found = examined(model, region, "columns_rows", {"tensor": 1}, roles)
    looked = looked_at(model, found.chain, share_of(batch, max(1, samples // many)), loss, found.rows_dim)
    told = shared((looked, topology))
    seen, asked = slowest([one for one, _ in told]), StepAsked(samples, told[0][1], optimizer_slots)
    prices, left_out = by_rank_0(lambda: all_priced(model, found, LossStep(batch, loss), roles, seen, asked, many))
    made = MeshPlan(region, "data", {"data": many}, False, roles, samples, memory_bytes, prices, seen, left_out)
    taken = cheapest_fitting(made, max(ALIKE, min(asked.topology.scatter, MOST_ALIKE)))
    made = made.choosing(taken.way, taken.mesh, fsdp=taken.fsdp)
    if is_rank_0():
        print(made)
    return made


def cheapest_fitting(found: MeshPlan, alike: float) -> MeshPrice:
    """The row that holds least of those whose prices are as good as the lowest that fits.

    Raises:
        ValueError: there is none.
    """
    if not found.prices:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.left_out.items())
        raise ValueError(
            f"tensor.plan: no mesh can be priced ({reasons}); give tensor.cut a way and a mesh of your own"
        )
    fitting = [one for one in found.prices if one.fits(found.memory_bytes)]
    least = min(found.prices, key=lambda one: one.held_bytes)
    if not fitting:
        raise ValueError(
            f"tensor.plan: no mesh fits {found.memory_bytes} bytes; the least, {least.name}, holds "
            f"{least.held_bytes:.0f}; take smaller batches, or more ranks"
        )
    near = fitting[0].seconds * (1 + alike)
    return min((one for one in fitting if one.seconds <= near), key=lambda one: one.held_bytes)


def all_priced(
    model: nn.Module,
    region: Examined,
    step: LossStep,
    roles: Mapping[str, str],
    seen: Inventory,
    asked: StepAsked,
    many: int,
) -> tuple[tuple[MeshPrice, ...], dict[str, str]]:
    """The cheapest first; and what is not possible, with the reason."""
    prices, left_out, calls = list[MeshPrice](), dict[str, str](), dict[int, FakeCalls]()
    for way, sizes in _meshes(many):
        data = sizes["data"]
        if asked.samples % data:
            continue
        if data not in calls:
            calls[data] = fake_calls(
                model, region.chain, partial(step.loss, model, share_of(step.batch, asked.samples // data))
            )
        try:
            dry = dry_run(model, region.region, way, sizes, roles, calls[data])
        except (ValueError, RuntimeError) as error:
            left_out[named(way, sizes)] = str(error).partition("\n")[0]
            continue
        if WAYS[way].exchanges and not any(
            one.kind in ("AllToAll", "Shift") for axis in dry.axes for one in axis.requests
        ):
            left_out[named(way, sizes)] = "no scaled_dot_product_attention in it, so nobody knows how tokens meet"
            continue
        prices += [priced(seen, way, sizes, dry, asked, fsdp=fsdp) for fsdp in (False, True)[: 1 + (data > 1)]]
    return tuple(sorted(prices, key=lambda one: one.seconds)), left_out


def _meshes(many: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Every way and every mesh of so many ranks, the data axis first."""
    for data in range(1, many + 1):
        left, rest = divmod(many, data)
        if rest:
            continue
        if left == 1:
            yield "data", {"data": data}
            continue
        for way, rule in WAYS.items():
            if len(rule.axes) == 1:
                yield way, {"data": data, rule.axes[0]: left}
            elif rule.axes:
                square = [name for name in rule.axes if name != "depth"]
                for q in range(2, left + 1):
                    depth, odd = divmod(left, q ** len(square))
                    if not odd and depth and (depth > 1) == ("depth" in rule.axes):
                        yield way, {"data": data, **{name: depth if name == "depth" else q for name in rule.axes}}
