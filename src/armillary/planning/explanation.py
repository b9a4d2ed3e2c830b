"""Why a plan is what it is: a sentence for every parameter, and what became of every candidate."""

from collections.abc import Mapping
from dataclasses import dataclass

from armillary.facts.parameter import ParameterFact
from armillary.facts.profile_table import bytes_text, seconds_text
from armillary.planning.candidates import Candidate, Question, allowed, candidates
from armillary.planning.constraints import allows, why_not_by_row
from armillary.planning.pricing import idle_round

__all__ = ["Verdict", "reason", "verdicts"]


@dataclass(frozen=True)
class Verdict:
    """A candidate and what became of it. lost: why it was not taken, empty for the one that was."""

    candidate: Candidate
    lost: str

    @property
    def is_chosen(self) -> bool:
        return not self.lost


def reason(
    fact: ParameterFact, free: Mapping[str, Candidate], chosen: Mapping[str, Candidate], question: Question
) -> str:
    """One sentence: what decided, and the price of the runner-up.

    Args:
        free, chosen: the cheapest choice before and after everything was made to fit in memory.
    """
    one = chosen[fact.name]
    if fact.name in question.wanted:
        return f"by constraint {question.wanted[fact.name]}{_against(one, question, fact)}"
    if fact.reads == "never":
        return "never read"
    if fact.reads == "dense":
        return "read whole"
    if not fact.shardable:
        return f"not by row: {why_not_by_row(fact)}"
    if question.case.topology.workers == 1:
        return "one worker: nothing crosses"
    said = f"a worker reads {100 * fact.alpha:.2g} % of its rows: {seconds_text(one.forecast.seconds)}"
    if free[fact.name] != one:
        cheaper = free[fact.name]
        return f"{said}; {cheaper.choice}, {seconds_text(cheaper.forecast.seconds)}, does not fit in memory"
    return f"{said}{_against(one, question, fact)}"


def _against(one: Candidate, question: Question, fact: ParameterFact) -> str:
    """The cheapest other exchange that the constraint allows; and why it lost, if by itself it is cheaper."""
    others = [other for other in allowed(fact, question) if other.choice.name != one.choice.name]
    if not others:
        return ""
    other = min(others, key=lambda way: way.forecast.seconds)
    said, round_ = f"; next {other.choice}, {seconds_text(other.forecast.seconds)}", 0.0
    if other.is_row_sharded != one.is_row_sharded:
        round_ = idle_round(question.case.topology).seconds
    saved = one.forecast.seconds - other.forecast.seconds
    if other.is_row_sharded and saved > 0 and round_:
        said += f" and {seconds_text(round_)} for the message that ends lookups"
    saved += round_ if one.is_row_sharded else -round_
    more = other.forecast.memory_bytes - one.forecast.memory_bytes
    return f"{said}, not clearly faster and {bytes_text(more)} more memory" if saved > 0 and more > 0 else said


def verdicts(free: Mapping[str, Candidate], chosen: Mapping[str, Candidate], question: Question) -> tuple[Verdict, ...]:
    """Of every parameter that is read by row, in the model's order, candidates in the order they were listed."""
    return tuple(
        Verdict(way, _lost(way, free[fact.name], chosen[fact.name], question))
        for fact in question.trained
        if fact.reads == "rows"
        for way in candidates(fact, question)
    )


def _lost(way: Candidate, free: Candidate, chosen: Candidate, question: Question) -> str:
    demanded = question.wanted.get(way.parameter)
    if way == chosen:
        return ""
    if not allows(demanded, way.choice):
        return f"constraint: {demanded}"
    slower = way.forecast.seconds - chosen.forecast.seconds
    if slower >= 0 and chosen == free:
        return f"{seconds_text(slower)} slower"
    more = way.forecast.memory_bytes - chosen.forecast.memory_bytes
    if chosen == free and more > 0:
        return f"{seconds_text(-slower)} faster, which is not clear, and {bytes_text(more)} more memory"
    more += way.peak.crossing_bytes - chosen.peak.crossing_bytes
    if more > 0 and chosen != free:
        return f"needs {bytes_text(more)} more, which do not fit"
    if slower >= 0:
        return f"{seconds_text(slower)} slower"
    return f"{seconds_text(-slower)} faster, but takes one message more, which ends lookups"
