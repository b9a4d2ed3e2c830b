"""Data parallelism without a common clock: workers pull, compute and push, and nobody waits for the slowest.

Owners step with every push as it comes, at its worker's learning rate. A worker may begin a step as long as it is no
more than `bound` steps ahead of the slowest; with bound=None nobody ever waits. In the long run a bound makes all as
slow as the slowest, so it gains where ranks are slow by turns, and nothing where one always is.

Source: Parallax (Kim et al., 2019), asynchronous training; stale synchronous parallel (Ho et al., 2013).
"""

from armillary.plans.advice import Advice, Situation, advises, planned
from armillary.plans.mesh import DATA
from armillary.plans.registry import Choice
from armillary.plans.update_log import refused_bound
from armillary.schedules.costs import Planned
from armillary.schedules.method import PARAMETER_SERVER, Method, OptionRules, Placing, ScheduleOptions
from armillary.schedules.registry import SCHEDULES
from armillary.schedules.schedule import Schedule, one_pass

__all__ = ["asynchronous"]

BOUND = 4


def asynchronous() -> Schedule:
    """One worker, one batch: what others do meanwhile is no part of it."""
    return Schedule("asynchronous", 2, (one_pass(0, 1, start=0),), ((0,),))


def _check(options: ScheduleOptions) -> None:
    if why := refused_bound(options.bound):
        raise ValueError(f"schedule: asynchronous has {why}")
    if options.clip_norm is not None:
        raise ValueError(
            "schedule: asynchronous cannot clip by a global norm, as owners step with their parts of a gradient as "
            "they come; drop clip_norm, and take a smaller learning rate"
        )
    if options.micro_batches > 1:
        raise ValueError(
            "schedule: asynchronous accumulates nothing, as every batch is an update of its own; drop micro_batches, "
            "or take larger batches"
        )


def _notes(planned: Planned) -> list[str]:
    options, workers = planned.options, planned.workers
    if workers == 1:
        return ["one worker has nobody to be waited for by: schedule simultaneous is exact, and as fast"]
    said = "no step waits" if options.bound is None else f"no worker begins more than {options.bound} steps ahead"
    return [
        f"NOT exact: a gradient is stepped with when it comes, after others that it knew nothing of; {said}",
        f"{workers} workers make {workers} updates where plain data parallelism makes one of their mean: learning rate "
        "and momentum want to be smaller",
    ]


SCHEDULES.register(
    "asynchronous",
    Method(
        table=lambda options: asynchronous(),
        options=OptionRules(
            knows=frozenset({"bound", "clip_norm", "micro_batches"}),
            defaults=lambda given, workers: {"bound": BOUND},
            follows=("micro_batches",),
            check=_check,
        ),
        examples=({"workers": 3, "bound": 2}, {"workers": 2, "bound": None}, {"workers": 1}),
        placement=Placing(axis=DATA, deals_rows=True),
        step_mode=PARAMETER_SERVER,
        is_cut=False,
        replicates_table=True,
        notes=_notes,
    ),
)


@advises("asynchronous updates", "workers pull, compute and push; nobody waits", "methods/asynchronous.md")
def _advice(situation: Situation) -> Advice:
    schedule = Choice("asynchronous")
    return planned(situation, "as many updates as workers", f"--schedule {schedule}", schedule=schedule)
