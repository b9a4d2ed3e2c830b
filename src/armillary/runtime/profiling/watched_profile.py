"""The profile of a model from steps of its own training: what all ranks saw, put together.

One stage stands for the whole model, as nobody may hang hooks on the user's modules for long; its times include the
watching. What a batch's parts would do was not tried.
"""

from collections.abc import Sequence

from torch import nn

from armillary.facts.profile import Profile
from armillary.facts.stage import StageFact
from armillary.facts.stage_paths import OUTSIDE
from armillary.runtime.profiling.loop_watch import SeenStep, Told
from armillary.runtime.profiling.profiler import fact_of, names_of, rows_of, running_modules
from armillary.runtime.profiling.reads import Reading
from armillary.runtime.profiling.row_counts import NO_LOOKUPS

__all__ = ["watched_profile"]


def watched_profile(model: nn.Module, everyones: Sequence[Told], workers_per_node: int) -> Profile:
    """
    Args:
        everyones: in the order of ranks, of the same steps.
    """
    workers, steps = len(everyones), range(len(everyones[0].steps))
    batches = [told.steps[step] for step in steps for told in everyones]
    order = list(dict.fromkeys(name for told in everyones for name in told.arrivals))
    facts = []
    for parameter, (name, *aliases) in names_of(model).items():
        reading = Reading(parameter)
        for one in (told.seen[name] for told in everyones):
            reading.gathers.update(one.gathers)
            reading.dense.update(one.dense)
            reading.refusals.update(one.refusals)
            reading.is_rewritten |= one.is_rewritten
        looked = [batch.lookups.get(name, NO_LOOKUPS) for batch in batches]
        rows = rows_of(reading, looked, workers, workers_per_node)
        arrival = order.index(name) if name in order else None
        facts.append(fact_of(name, aliases, reading, arrival, OUTSIDE, rows))
    slowest = max((told.steps[-1] for told in everyones), key=_seconds)  # the first steps warm up
    held, activations = sum(fact.bytes for fact in facts), max(told.activation_bytes for told in everyones)
    stage = StageFact(OUTSIDE, 0, held, activations, slowest.forward_seconds, slowest.backward_seconds)
    return Profile(tuple(facts), (stage,), len(batches), workers, workers_per_node, running_modules(model))


def _seconds(step: SeenStep) -> float:
    return step.forward_seconds + step.backward_seconds
