"""Weights that cross the ranks: groups whose replicas differ meet, before the optimizer's step or after it.

Nothing else is asked of the ranks then, so that an exchange with neighbours only waits for no one else. A rank looks at
its own weights before they leave: what is not finite would reach everybody's.
"""

from collections.abc import Sequence

import torch

from armillary.codecs.finite import all_finite
from armillary.exchanges.dense import Meeting
from armillary.exchanges.parcel import Parcel
from armillary.runtime.hybrid.dense_unit import DenseUnit
from armillary.runtime.hybrid.in_flight import InFlight, carry_all
from armillary.runtime.transport import Transport

__all__ = ["meet"]


@torch.no_grad()
def meet(units: Sequence[object], steps: int, when: Meeting, transport: Transport) -> None:
    """Groups that are due before or after that step, from first to last request of all of them.

    Args:
        steps: how many are complete after it.

    Raises:
        FloatingPointError: this rank's weights are not finite. Nothing was sent.
    """
    meeting = [unit for unit in units if isinstance(unit, DenseUnit) and unit.meets(steps, when)]
    parcels = [unit.weigh_in() for unit in meeting]
    _refuse_sick(parcels, steps, transport.place.rank)
    pushes = [unit.push(parcel, transport.place) for unit, parcel in zip(meeting, parcels, strict=True)]
    flights = [
        InFlight(push, unit.name, unit.exchange.requests - 1) for push, unit in zip(pushes, meeting, strict=True)
    ]
    for unit, moved in zip(meeting, carry_all(flights, transport), strict=True):
        unit.take_weights(moved)


def _refuse_sick(parcels: Sequence[Parcel], steps: int, rank: int) -> None:
    found = [one for one in parcels if not bool(all_finite(one.values))]
    sick = [
        name
        for one in found
        for name, (begin, end) in zip(one.layout.names, one.layout.spans, strict=True)
        if not bool(all_finite(one.values[begin:end]))
    ]
    if sick:
        more = f" and {len(sick) - 1} more" if len(sick) > 1 else ""
        raise FloatingPointError(
            f"rank {rank}: in step {steps} its weights are not finite ({sick[0]}{more}), and none were sent to the "
            "other ranks; look at this rank's batches and learning rate, and begin again from a checkpoint"
        )
