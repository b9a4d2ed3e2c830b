"""What residency says of itself for `advise`: the least memory, or the budget given, and what a pass then takes.

The room measures a model stage by stage, which takes about ten passes; where that is long it waits to be asked.
"""

from dataclasses import replace

from armillary.plans.advice import Advice, Combination, Situation, advises, not_for
from armillary.plans.group import Forecast
from armillary.plans.units import bytes_text, seconds_text
from armillary.residency.held import hold
from armillary.residency.plan import ResidencyPlan
from armillary.residency.planner import least_bytes, search

__all__: list[str] = []

PASSES = 10  # that measuring stage by stage takes about
BUDGETED = 1.01  # times the least, so that rounding does not refuse it


@advises("KARMA", "activations kept, recomputed or swapped", "methods/residency.md")
def _advice(situation: Situation) -> Advice:
    if not situation.affords(PASSES * situation.compute_seconds):
        chosen = situation.chosen.forecast
        budget = int(min(situation.topology.memory_bytes, chosen.memory_bytes + chosen.peak_bytes / 2))
        said = f"{bytes_text(situation.profile.activation_bytes)} of activations are kept"
        shell, python = _typed(situation, budget), _script(situation, budget)
        return Advice(True, said, shell=shell, python=python, tells="--measure")
    try:
        kept = hold(situation.model, situation.batches[:1], situation.loss, optimizer=situation.optimizer).plan
    except (ValueError, TypeError) as error:
        return not_for(str(error))
    most, least = kept.played.bound_bytes, least_bytes(kept.chain, None, {})
    if least >= most:
        return not_for("to compute a stage again spares no memory; residency.hold(stages=[...]) takes smaller ones")
    limit = situation.topology.memory_bytes
    budget = limit if least <= limit < most else int(BUDGETED * least)
    found = search(kept.chain, budget, None, {})
    made = ResidencyPlan(kept.chain, found.residencies, found.slots, budget, None, found.gap)
    forecast = _beside(situation.chosen.forecast, kept, made, situation.workers)
    both = Combination("the plan by price + KARMA", forecast, python=_script(situation, budget, is_planned=True))
    return Advice(
        True,
        f"a pass takes {seconds_text(made.forecast.seconds)}, not {seconds_text(kept.forecast.seconds)}",
        forecast,
        (),
        _typed(situation, budget),
        _script(situation, budget),
        source=made,
        combinations=(both,) if situation.workers > 1 else (),
    )


def _beside(plan: Forecast, kept: ResidencyPlan, made: ResidencyPlan, workers: int) -> Forecast:
    """The plan by price with these activations; on one worker, which shares nothing, what the room's own plan holds."""
    seconds = plan.seconds + made.forecast.seconds - kept.forecast.seconds
    whole = plan.memory_bytes if workers == 1 else kept.played.peak_bytes - plan.peak_bytes
    peak_bytes = max(0.0, made.played.peak_bytes - whole)
    return replace(plan, seconds=seconds, peak_bytes=peak_bytes, moved_bytes=made.forecast.moved_bytes)


def _typed(situation: Situation, budget: int) -> str:
    return f"armillary residency {situation.typed} --memory {budget // 1024 + 1}KiB" if situation.typed else ""


def _script(situation: Situation, budget: int, is_planned: bool = False) -> str:
    step = "loss(model, batch).backward(), optimizer.step(), optimizer.zero_grad()"
    if is_planned:
        return situation.script(
            "from armillary import parallelize, residency  # under torchrun",
            f"held = residency.hold(model, batches, loss, memory_bytes={budget})",
            "run = parallelize(model, optimizer, batches, loss)",
            "with held:  # around the loop as it is",
            f"    for batch in batches[run.rank :: run.workers]: {step}",
        )
    return situation.script(
        "from armillary import residency",
        f"with residency.hold(model, batches, loss, memory_bytes={budget}):  # around the loop as it is",
        "    for batch in batches:",
        f"        {step}",
    )
