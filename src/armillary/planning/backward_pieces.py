"""Backward in pieces: which part of it comes when, and whose gradient is there after it.

The profile knows how long each stage's backward takes and in which order gradients arrived; within a stage each is
taken to need a part of the time in proportion to the elements read.
"""

from typing import NamedTuple

from armillary.facts.parameter import ParameterFact
from armillary.facts.profile import Profile
from armillary.facts.stage import StageFact

__all__ = ["OUTSIDE", "Piece", "backward_pieces"]

OUTSIDE = ""


class Piece(NamedTuple):
    """A part of backward, and the parameter whose gradient is there after it."""

    stage: str
    seconds: float
    parameter: str | None


def backward_pieces(profile: Profile) -> list[Piece]:
    """Backward, stage by stage, in the order in which their first gradients arrived."""
    of_stage: dict[str, list[ParameterFact]] = {stage.name: [] for stage in profile.stages}
    for fact in profile.arrivals:
        of_stage[fact.stage].append(fact)
    pieces = []
    for stage in _backward_order(profile, of_stage):
        facts = of_stage[stage.name]
        works = [fact.alpha * fact.elements for fact in facts]
        total = sum(works)
        if total <= 0:
            pieces += [Piece(stage.name, 0.0, fact.name) for fact in facts]
            pieces.append(Piece(stage.name, stage.backward_seconds, None))
            continue
        for fact, work in zip(facts, works, strict=True):
            pieces.append(Piece(stage.name, stage.backward_seconds * work / total, fact.name))
    return pieces


def _backward_order(profile: Profile, of_stage: dict[str, list[ParameterFact]]) -> list[StageFact]:
    """Against the model's order where gradients say nothing; what has no gradient goes with the stage after it."""
    keyed: list[tuple[int, int, StageFact]] = []
    last = -1
    outside = [stage for stage in profile.stages if stage.name == OUTSIDE]
    inner = [stage for stage in profile.stages if stage.name != OUTSIDE]
    for stage in [*outside, *reversed(inner)]:
        arrivals = [fact.arrival for fact in of_stage[stage.name] if fact.arrival is not None]
        last = min(arrivals) if arrivals else last
        keyed.append((last, len(keyed), stage))
    return [stage for _, _, stage in sorted(keyed, key=lambda entry: entry[:2])]
