"""Which of a transport's process groups carries a request, and where this rank stands in it.

Nodes of one rank open no groups: a node is then this rank alone, a rail is the whole world. Along an axis that nobody
has opened a rank is alone.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from armillary.exchanges.exchange import RankInfo
from armillary.facts.collectives import Request, Scope

__all__ = ["Groups", "group_of", "place_in"]

Groups = Mapping[tuple[Scope, str], tuple[Any, RankInfo]]  # by scope and device


def group_of(groups: Groups, scope: Scope, tensor: Tensor) -> Any:
    """Tensors of a device without a group of its own travel by the host's."""
    if scope == "rail" and ("rail", "cpu") not in groups:
        scope = "world"
    device = tensor.device.type if (scope, tensor.device.type) in groups else "cpu"
    return groups[scope, device][0]


def place_in(groups: Groups, request: Request) -> RankInfo:
    """This rank's, among those that the request concerns."""
    if (request.scope, "cpu") not in groups:
        return groups["world", "cpu"][1] if request.scope == "rail" else RankInfo(0, 1)
    return groups[request.scope, "cpu"][1]
