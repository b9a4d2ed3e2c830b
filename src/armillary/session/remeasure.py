"""Alpha and load of a run's tables, measured while it trains: the facts a profile holds, from the steps just made.

They are counted as the profiler counts them (`runtime/profiling/row_counts.py`), so old and new facts can be compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from armillary.exchanges.exchange import RankInfo
from armillary.exchanges.ownership import Ownership
from armillary.facts.parameter import ParameterFact
from armillary.facts.profile import Profile
from armillary.planning.traffic import merged_rows
from armillary.runtime.hybrid.row_samples import KEPT_STEPS, AskedRows
from armillary.runtime.profiling.row_counts import NO_LOOKUPS, Lookups, merged, row_facts
from armillary.session.engines.user_loop import UserLoop

__all__ = ["Looked", "imbalance", "looked_up", "remeasured", "sampled"]

Looked = Mapping[str, Sequence[Lookups]]  # by table: one per worker and step, worker w's are [w::workers]


def sampled(run: UserLoop) -> dict[str, dict[int, Lookups]]:
    """What this rank asked of each table in the sampled steps it read it in: table -> step -> look-ups."""
    found: dict[str, dict[int, Lookups]] = {}
    for step, tables in run.executor.look_ups.samples.steps.items():
        for name, asked in tables.items():
            ownership = run.tables[name].ownership
            found.setdefault(name, {})[step] = merged([_counted(one, ownership) for one in asked])
    return found


def _counted(asked: AskedRows, ownership: Ownership) -> Lookups:
    keys = asked.keys.cpu()
    counts = torch.bincount(asked.inverse.flatten().cpu(), minlength=len(keys))
    return Lookups(1, ownership.ids_of(keys), counts, len(keys))


def looked_up(everyones: Sequence[Mapping[str, Mapping[int, Lookups]]]) -> Looked:
    """
    Args:
        everyones: every rank's `sampled`. A rank that did not read a table in a step asked nothing of it.
    """
    found: dict[str, list[Lookups]] = {}
    for name in dict.fromkeys(name for mine in everyones for name in mine):
        steps = sorted({step for mine in everyones for step in mine.get(name, {})})[-KEPT_STEPS:]
        found[name] = [mine.get(name, {}).get(step, NO_LOOKUPS) for step in steps for mine in everyones]
    return found


def remeasured(profile: Profile, looked: Looked, place: RankInfo) -> Profile:
    """The profile for this job's workers, with new row facts of the tables that were looked at. Of others they stay; if
    they were taken with other workers, they are carried over as planning does it, with even loads.

    Args:
        looked: of one table at least.
    """
    parameters = tuple(
        _anew(fact, looked[fact.name], place) if fact.name in looked else _carried_over(fact, profile, place)
        for fact in profile.parameters
    )
    batches = max(map(len, looked.values()))
    return replace(
        profile,
        parameters=parameters, batches=batches, workers=place.workers, workers_per_node=place.workers_per_node,
    )  # fmt: skip


def _anew(fact: ParameterFact, lookups: Sequence[Lookups], place: RankInfo) -> ParameterFact:
    if fact.rows is None:
        return fact
    rows = row_facts(fact.rows.rows, fact.rows.row_bytes, lookups, place.workers, place.workers_per_node)
    # What the profile alone can tell: sampled steps do not follow one another, and say nothing of padding.
    return replace(fact, rows=replace(rows, padding_idx=fact.rows.padding_idx, repeated=fact.rows.repeated))


def _carried_over(fact: ParameterFact, profile: Profile, place: RankInfo) -> ParameterFact:
    rows = fact.rows
    if rows is None or (profile.workers, profile.workers_per_node) == (place.workers, place.workers_per_node):
        return fact
    node = max(rows.alpha_worker, merged_rows(rows, profile, place.workers_per_node) / rows.rows)
    union = max(node, merged_rows(rows, profile, place.workers) / rows.rows)
    even = (1 / place.workers,) * place.workers
    facts = replace(rows, alpha_node=node, alpha_union=union, load_modulo=even, load_hashed=even, load_blocks=even)
    return replace(fact, rows=facts)


def imbalance(lookups: Sequence[Lookups], ownership: Ownership) -> float:
    """Rows that the busiest rank served over those the mean one did; 1 is perfect, the number of ranks the worst."""
    served = [0] * ownership.workers
    for asked in lookups:
        counts = ownership.counts(ownership.keys(asked.rows).sort().values)
        served = [before + count for before, count in zip(served, counts, strict=True)]
    return max(served) * len(served) / max(sum(served), 1)
