"""Parameters that several stages read: the first of them owns one, the others hold copies of it (`schedules/ties.py`).

A profile knows the names of a parameter, and the modules at which a model can be cut.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from armillary.facts.parameter import ParameterFact
from armillary.facts.profile import Profile
from armillary.schedules.ties import ParameterUse

__all__ = ["copies_of", "owners_of", "stage_numbers", "uses_of"]


def stage_numbers(profile: Profile, begins: Sequence[str]) -> dict[str, int]:
    """By module of the profile, the stage that it is in. begins: the first module of every stage."""
    names = [unit.name for unit in profile.stages if unit.name]
    edges = [*map(names.index, begins), len(names)]
    return {name: j for j, (start, end) in enumerate(pairwise(edges)) for name in names[start:end]}


def uses_of(fact: ParameterFact, stages: Mapping[str, int]) -> list[ParameterUse]:
    """One for each stage that holds the parameter under a name of its own, the first stage first."""
    found: dict[int, ParameterUse] = {}
    for name in (fact.name, *fact.aliases):
        if holders := [unit for unit in stages if name.startswith(f"{unit}.")]:
            stage = stages[max(holders, key=len)]
            found.setdefault(stage, ParameterUse(stage, name))
    return [found[stage] for stage in sorted(found)]


def copies_of(profile: Profile, begins: Sequence[str]) -> dict[int, list[ParameterFact]]:
    """What a stage has copies of, by stage that has some."""
    stages, found = stage_numbers(profile, begins), dict[int, list[ParameterFact]]()
    for fact in profile.parameters:
        for use in uses_of(fact, stages)[1:] if fact.requires_grad else ():
            found.setdefault(use.stage, []).append(fact)
    return found


def owners_of(profile: Profile, begins: Sequence[str]) -> dict[int, int]:
    """By stage that has copies, the stage that owns the parameters."""
    stages = stage_numbers(profile, begins)
    return {j: uses_of(facts[0], stages)[0].stage for j, facts in copies_of(profile, begins).items()}
