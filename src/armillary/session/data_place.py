"""Where a rank stands among those that hold the same parameters, each with data of its own."""

from armillary.exchanges.rank_info import RankInfo
from armillary.facts.mesh import DATA, Mesh

__all__ = ["data_place", "data_ranks"]


def data_ranks(mesh: Mesh, rank: int) -> list[int]:
    """Those ranks, ascending; this one alone where the mesh has no data axis."""
    groups = mesh.members(DATA) if DATA in mesh.sizes else [[rank]]
    return next(ranks for ranks in groups if rank in ranks)


def data_place(mesh: Mesh, place: RankInfo) -> RankInfo:
    """This rank's among them. Nodes are known only where these are all ranks; else each counts as a node."""
    ranks = data_ranks(mesh, place.rank)
    return place if len(ranks) == place.workers else RankInfo(ranks.index(place.rank), len(ranks))
