"""`--schedule`: the choice that commands share, typed as plans print it."""

from dataclasses import replace
from typing import Annotated

import typer

from armillary.facts.choice import Choice
from armillary.facts.plan import SIMULTANEOUS
from armillary.schedules.registry import SCHEDULES
from armillary.session.decide import Wishes

__all__ = ["Schedule", "chosen", "scheduled"]

Schedule = Annotated[
    str,
    typer.Option(
        metavar="CHOICE",
        help="Who does what when, as plans print it: 'ring(slack=1)', 'pipeline(micro_batches=4, clip_norm=1.0)'. "
        f"There are {', '.join(SCHEDULES.all())}. Options are slack, micro_batches, stages, points (where to cut), "
        "costs, recompute, clip_norm, clip_by, remedies, bucket_bytes; one that lacks an option says which it has. The "
        "plan says what is NOT exact.",
    ),
]


def chosen(text: str) -> Choice:
    """
    Raises:
        ValueError: it is no choice or no schedule.
    """
    choice = Choice.parse(text)
    SCHEDULES[choice.name]  # refuses a name that is none
    return choice


def scheduled(text: str, wishes: Wishes) -> Wishes:
    """The wishes with the schedule that was typed.

    Raises:
        ValueError: it is no choice or no schedule, or a plan was given beside it.
    """
    choice = chosen(text)
    if choice == SIMULTANEOUS:
        return wishes
    if wishes.plan is not None:
        raise ValueError("--plan is carried out as it is; edit its schedule, or drop --schedule")
    return replace(wishes, schedule=choice)
