"""The contract of a schedule, held against its own examples: which of its rules are broken, in words.

Its table refuses by itself what cannot be computed. What is looked at here is what ranks make of it: that none waits
for ever, under the rules of gloo and of NCCL, and that the entry says of its table what is so.
"""

from collections.abc import Callable, Mapping
from itertools import product

from armillary.schedules.checker import Rule, Setting, flaw
from armillary.schedules.lowering import Lowering
from armillary.schedules.method import ScheduleOptions
from armillary.schedules.rank_list import Wires

__all__ = ["SCHEDULE_RULES"]

CALLS = ("tttd", "tsttd", "tdtttsd")  # t: a step is handed in; s: what is under way is worked off; d: all of it
RULES: tuple[Rule, ...] = ("gloo", "nccl")


def can_be_computed(options: ScheduleOptions, workers: int) -> str:
    """The table refuses by itself what cannot."""
    options.schedule()
    return ""


def nobody_waits_for_ever(options: ScheduleOptions, workers: int) -> str:
    schedule, together = options.schedule(), range(workers // options.replicas(workers))
    ranks = options.ranks(together) if len(together) > 1 else [0] * schedule.workers
    played = (0,) * schedule.workers if len(together) == 1 else tuple(range(schedule.workers))
    for calls, rule in product(CALLS, RULES):
        lists = []
        for rank in together:
            wires = Wires(lends=options.method.lends, buffered=range(schedule.stages))
            rows = Lowering(schedule, rank, ranks, wires=wires)
            does = {"t": rows.next_step, "s": rows.rest, "d": rows.drain}
            lists.append([one for call in calls for one in does[call]()])
        drains = [calls[:place].count("t") for place, call in enumerate(calls) if call == "d"]
        if found := flaw(lists, Setting(schedule, played, drains=drains), rule):
            return f"on {workers} processes, under the rules of {rule}: {found}"
    return ""


def says_of_its_table_what_is_so(options: ScheduleOptions, workers: int) -> str:
    schedule, method = options.schedule(), options.method
    said = (options.stages, options.micro_batches)
    if said != (schedule.stages, schedule.micro_batches):
        return f"its options say {said} stages and micro-batches, its table {schedule.stages, schedule.micro_batches}"
    for stage in range(options.stages):
        if not 0 <= (owner := method.owner(options, stage)) < workers:
            return f"the owner of stage {stage} is process {owner} of {workers}"
        for message in method.traffic(options, stage).messages:
            if message.stage != stage or not (0 <= message.sender < workers and 0 <= message.receiver < workers):
                return f"stage {stage} has the message {message}, which is of another stage or of no process"
    return ""


def has_a_pace_that_does_the_work(options: ScheduleOptions, workers: int) -> str:
    """No faster than if all processes of a table work all the time. No slower than if one at a time does, each stage
    taking as long as the slowest: turns of a table may be as long as that."""
    together, count = workers // options.replicas(workers), options.micro_batches
    for seconds in ([1.0 + stage for stage in range(options.stages)], [1.0] * options.stages):
        work, slowest = sum(seconds) * count, max(seconds) * options.stages * count
        fastest, found = work / together, options.method.pace(options, seconds)
        if not fastest * (1 - 1e-9) <= found <= slowest * (1 + 1e-9):
            return (
                f"stages of {seconds} seconds and {count} micro-batches are work of {work:g} seconds, of {fastest:g} "
                f"shared by {together} processes; one at a time, each stage as slow as the slowest, takes {slowest:g}; "
                f"pace says a step of {found:g}"
            )
    return ""


SCHEDULE_RULES: Mapping[str, Callable[[ScheduleOptions, int], str]] = {
    "its table can be computed": can_be_computed,
    "no rank waits for ever, reads what is not there, or leaves a letter": nobody_waits_for_ever,
    "owners, messages and sizes are those of its table": says_of_its_table_what_is_so,
    "`pace` is a time in which the work can be done": has_a_pace_that_does_the_work,
}
