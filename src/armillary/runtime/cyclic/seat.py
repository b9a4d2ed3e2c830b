"""Where a process sits among those that carry out one schedule: its rank, who runs what, how it reaches the others."""

from dataclasses import dataclass, field

from armillary.runtime.channel import Channel
from armillary.runtime.cyclic.stage_tables import Tables
from armillary.runtime.cyclic.team import Team, alone
from armillary.schedules.placement import Ranks
from armillary.schedules.schedule import Schedule

__all__ = ["Seat", "in_a_row", "side_by_side"]


@dataclass(frozen=True, eq=False)
class Seat:
    """
    Args:
        ranks: by worker of the schedule, or which of them runs what.
        channel: to the other ranks; None if all workers are here.
        team: the ranks that hold the same stages, with data of their own.
        tables: of every stage that reads some, this rank's or not.
        one_queue: whether the channel has one for both directions of a pair, as NCCL has.
    """

    rank: int
    ranks: Ranks
    channel: Channel | None = None
    team: Team = field(default_factory=alone)
    tables: Tables = field(default_factory=dict)
    one_queue: bool = False


def in_a_row(
    schedule: Schedule, rank: int, channel: Channel, tables: Tables | None = None, one_queue: bool = False
) -> Seat:
    """A worker of the schedule a rank."""
    return Seat(rank, range(schedule.workers), channel, tables=tables or {}, one_queue=one_queue)


def side_by_side(schedule: Schedule, team: Team | None = None, tables: Tables | None = None) -> Seat:
    """All workers of the schedule in this process; the ranks of the team do the same with data of their own."""
    team = team or alone()
    return Seat(team.place.rank, [team.place.rank] * schedule.workers, team=team, tables=tables or {})
