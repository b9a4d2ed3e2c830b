"""Weights that cross the ranks: groups whose replicas differ meet, before the optimizer's step or after it.

Nothing else is asked of the ranks then, so that an exchange with neighbours only waits for no one else.
"""

from collections.abc import Sequence

import torch

from armillary.exchanges.dense import Meeting
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.runtime.hybrid.in_flight import InFlight, carry_all
from armillary.runtime.transport import Transport

__all__ = ["meet"]


@torch.no_grad()
def meet(units: Sequence[object], steps: int, when: Meeting, transport: Transport) -> None:
    """Groups that are due before or after that step, from first to last request of all of them.

    Args:
        steps: how many are complete after it.
    """
    meeting = [unit for unit in units if isinstance(unit, DenseUnit) and unit.meets(steps, when)]
    pushes = [unit.push(unit.bucket.weigh_in(), transport.place) for unit in meeting]
    flights = [
        InFlight(push, unit.name, unit.exchange.requests - 1) for push, unit in zip(pushes, meeting, strict=True)
    ]
    for unit, moved in zip(meeting, carry_all(flights, transport), strict=True):
        unit.take_weights(moved)
