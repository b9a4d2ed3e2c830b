"""Where a process sits among those that carry out one schedule: its rank, who runs what, how it reaches the others."""

from dataclasses import dataclass, field

from armillary.runtime.channel import Channel
from armillary.runtime.cyclic.stage_replicas import StageReplicas, alone
from armillary.schedules.placement import Ranks
from armillary.schedules.schedule import Schedule

__all__ = ["Seat", "in_a_row", "side_by_side"]


@dataclass(frozen=True, eq=False)
class Seat:
    """
    Args:
        ranks: by worker of the schedule, or which of them runs what.
        channel: to the other ranks; None if all workers are here.
        replicas: the ranks that hold the same stages, with data of their own.
        one_queue: whether the channel has one for both directions of a pair, as NCCL has.
    """

    rank: int
    ranks: Ranks
    channel: Channel | None = None
    replicas: StageReplicas = field(default_factory=alone)
    one_queue: bool = False


def in_a_row(schedule: Schedule, rank: int, channel: Channel, one_queue: bool = False) -> Seat:
    """A worker of the schedule a rank."""
    return Seat(rank, range(schedule.workers), channel, one_queue=one_queue)


def side_by_side(schedule: Schedule, replicas: StageReplicas | None = None) -> Seat:
    """All workers of the schedule in this process; its replicas do the same with data of their own."""
    replicas = replicas or alone()
    return Seat(replicas.place.rank, [replicas.place.rank] * schedule.workers, replicas=replicas)
