"""Ranks that carry out one schedule side by side, each on micro-batches of its own: data parallelism around a schedule.

When a stage's gradients of a step are complete here they are everywhere, in the order of the same table; then each
rank's mean is summed over the ranks and divided by their number. The stages' tables are not among them: their rows have
one owner each (`stage_tables.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from armillary.exchanges.exchange import Place
from armillary.facts.collectives import AllReduce, Scope
from armillary.runtime.cyclic.flat_stage import FlatStage
from armillary.runtime.cyclic.twin_bucket import Requests
from armillary.runtime.cyclic.versions import Means

__all__ = ["Team", "alone"]


@dataclass(frozen=True, eq=False)
class Team:
    """
    Args:
        place: of this rank among them. requests: to the others; None if there are none. scope: that names them.
    """

    place: Place
    requests: Requests | None = None
    scope: Scope = "world"

    def start_mean(self, parameters: Mapping[str, nn.Parameter], mine: Means, stage: int) -> Callable[[], Means]:
        """Asks for the mean over ranks of a stage's gradients; what is returned waits for it. A parameter that no rank
        used is left out.

        gloo adds three or more ranks' tensors in an order of its own: then the last bits may differ from a sum in rank
        order, though not between the ranks.
        """
        if self.place.workers == 1:
            return lambda: mine
        assert self.requests is not None
        flat = FlatStage(parameters)
        packed = flat.pack_gradients([mine.get(parameter) for parameter in flat.parameters])
        waits = [self.requests.start(AllReduce(one, self.scope), f"stage {stage}") for one in packed]

        def mean() -> Means:
            found = flat.unpack_gradients([wait() for wait in waits])
            with torch.no_grad():
                return {flat.parameters[place]: found[place].div_(self.place.workers) for place in sorted(found)}

        return mean


def alone() -> Team:
    """One rank."""
    return Team(Place(0, 1))
