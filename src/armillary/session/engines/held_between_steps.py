"""What a process holds between two steps under a schedule that owns the loop, by group of the plan."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from armillary.facts.plan import Plan
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.session.engines.replicas import beside_bytes

__all__ = ["Named", "held_by_group"]


class Named(NamedTuple):
    """A tensor that is held for a parameter."""

    parameter: str
    tensor: Tensor


def held_by_group(
    plan: Plan, tensors: Iterable[Named], units: Sequence[DenseUnit], beside: float
) -> Mapping[str, float]:
    """Bytes; a storage that several share counts once. What is of no group of the plan is with its first.

    Args:
        units: groups that cross by exchanges. beside: what is held besides the tensors, of the units among it.
    """
    group_of = {name: group.name for group in plan.groups for name in group.parameters}
    first = plan.groups[0].name
    found = {group.name: 0.0 for group in plan.groups}
    storages = {one.tensor.untyped_storage().data_ptr(): one for one in tensors}
    for name, tensor in storages.values():
        found[group_of.get(name, first)] += tensor.untyped_storage().nbytes()
    for unit in units:
        found[unit.name] += beside_bytes([unit])
    found[first] += beside - beside_bytes(units)
    return found
