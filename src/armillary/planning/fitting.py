"""Makes a choice fit the memory of a rank, and says what would fit when nothing does.

What the fullest rank holds is taken as the sum over groups, activations and frozen parameters; owners of split tables
are the same first ranks of each node, so their shares do add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from armillary.facts.plan import UPDATES
from armillary.facts.profile_table import bytes_text
from armillary.facts.topology import Topology
from armillary.planning.candidates import Candidate, Question, allowed

__all__ = ["Menu", "fit", "held_bytes", "menu", "refuse_misfit"]

Menu = Mapping[str, Sequence[Candidate]]

MOST_WORKERS = 1024


def menu(question: Question) -> dict[str, tuple[Candidate, ...]]:
    """What may be chosen for every trained parameter."""
    return {fact.name: allowed(fact, question) for fact in question.trained}


def held_bytes(question: Question) -> float:
    """What a rank holds whatever is chosen: activations of one batch and frozen parameters."""
    profile = question.case.profile
    frozen = sum(fact.bytes for fact in profile.parameters if not fact.requires_grad)
    return frozen + sum(stage.activation_bytes for stage in profile.stages)


def memory_of(chosen: Mapping[str, Candidate], question: Question) -> float:
    return held_bytes(question) + sum(one.forecast.memory_bytes for one in chosen.values())


def smallest(options: Menu) -> dict[str, Candidate]:
    return {name: min(ways, key=lambda one: one.forecast.memory_bytes) for name, ways in options.items()}


def fit(chosen: Mapping[str, Candidate], options: Menu, question: Question) -> dict[str, Candidate]:
    """Exchanges choices for smaller ones, the fewest seconds per byte saved first, until all fits.

    Raises:
        ValueError: even the smallest choice of every table does not fit; the message lists what would.
    """
    limit, fitted = question.case.topology.memory_bytes, dict(chosen)
    refuse_misfit(smallest(options), question)
    while memory_of(fitted, question) > limit:
        swaps = [
            ((way.forecast.seconds - fitted[name].forecast.seconds) / saved, name, way)
            for name, ways in options.items()
            for way in ways
            if (saved := fitted[name].forecast.memory_bytes - way.forecast.memory_bytes) > 0
        ]
        _, name, way = min(swaps, key=lambda swap: swap[:2])
        fitted[name] = way
    return fitted


def refuse_misfit(chosen: Mapping[str, Candidate], question: Question) -> None:
    """
    Raises:
        ValueError: the choice does not fit; the message lists what would.
    """
    limit, needed = question.case.topology.memory_bytes, memory_of(chosen, question)
    if needed <= limit:
        return
    largest = max(chosen.values(), key=lambda one: one.forecast.memory_bytes)
    activations = sum(stage.activation_bytes for stage in question.case.profile.stages)
    remedies = [*_lazy(question), *_replaced(question), *_more_workers(question), *_smaller_batch(needed, question)]
    remedies.append(f"ranks with {bytes_text(needed)} of memory")
    listing = "\n".join(f"  {place}. {remedy}" for place, remedy in enumerate(remedies, 1))
    raise ValueError(
        f"plan: nothing fits in {bytes_text(limit)} a rank; the smallest plan needs {bytes_text(needed)} (of it "
        f"{bytes_text(largest.forecast.memory_bytes)} for {largest.parameter!r} by {largest.choice}, activations "
        f"{bytes_text(activations)}). Any of these would do:\n{listing}"
    )


def _fits(question: Question) -> float:
    """What the smallest plan of another question needs, or 0 where it still does not fit."""
    needed = memory_of(smallest(menu(question)), question)
    return needed if needed <= question.case.topology.memory_bytes else 0.0


def _lazy(question: Question) -> list[str]:
    tables = [fact.name for fact in question.trained if fact.shardable and fact.name not in question.lazy]
    needed = _fits(replace(question, lazy=question.lazy.union(tables))) if tables else 0.0
    names = ", ".join(map(repr, tables))
    return [f"lazy=[{names}] ({UPDATES['lazy']}): {bytes_text(needed)}"] if needed else []


def _replaced(question: Question) -> list[str]:
    """Constraints that keep a table whole on every rank, dropped."""
    whole = [fact.name for fact in question.trained if fact.shardable and fact.name in question.wanted]
    wanted = {name: demand for name, demand in question.wanted.items() if name not in whole}
    needed = _fits(replace(question, wanted=wanted)) if whole else 0.0
    names = ", ".join(map(repr, whole))
    return [f"placement row_sharded for {names}, by dropping the constraint: {bytes_text(needed)}"] if needed else []


def _more_workers(question: Question) -> list[str]:
    topology = question.case.topology
    for step in range(1, MOST_WORKERS // topology.workers_per_node + 1):
        larger = _grown(topology, step)
        if larger.workers > MOST_WORKERS:
            break
        if needed := _fits(replace(question, case=replace(question.case, topology=larger))):
            return [f"{larger.workers} workers in {larger.nodes} node(s): {bytes_text(needed)}"]
    return []


def _grown(topology: Topology, step: int) -> Topology:
    if topology.nodes == 1:
        return replace(topology, workers_per_node=topology.workers_per_node + step)
    return replace(topology, nodes=topology.nodes + step)


def _smaller_batch(needed: float, question: Question) -> list[str]:
    activations = sum(stage.activation_bytes for stage in question.case.profile.stages)
    room = question.case.topology.memory_bytes - (needed - activations)
    if room <= 0:
        return []
    return [f"batches {activations / room:.1f} times smaller, whose activations take {bytes_text(room)}"]
