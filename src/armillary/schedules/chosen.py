"""What a plan's schedule is, read from its name and options: the one place that knows which schedules own the loop."""

from armillary.facts.plan import Choice
from armillary.schedules.cyclic_modes import CyclicOptions, read_options
from armillary.schedules.delayed_all_reduce import DelayedOptions

__all__ = ["LOOP_OWNERS", "ScheduleOptions", "read_choice"]

ScheduleOptions = CyclicOptions | DelayedOptions

LOOP_OWNERS = ("cyclic", "delayed_all_reduce")  # every other plan leaves the loop to the user


def read_choice(choice: Choice, processes: int) -> ScheduleOptions:
    """
    Raises:
        ValueError: no such schedule, or options that it does not have or that do not go together.
    """
    if choice.name == "cyclic":
        return read_options(choice.options, processes)
    if choice.name != "delayed_all_reduce":
        raise ValueError(f"schedule: {choice.name!r} owns no loop; there are {', '.join(LOOP_OWNERS)}")
    strange = sorted(set(choice.options) - {"clip_norm", "bucket_bytes"})
    if strange:
        raise ValueError(f"schedule: delayed_all_reduce may have clip_norm and bucket_bytes; got {', '.join(strange)}")
    return DelayedOptions(processes, **choice.options)
