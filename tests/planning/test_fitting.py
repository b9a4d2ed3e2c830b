"""A plan fits the memory of a rank, at the least cost; where none does, the message says what would."""

import re
from dataclasses import replace

import pytest

from armillary.planning.planner import explain, plan, plan_by_rule
from armillary.planning.pricing import ADAM, Case
from armillary.planning.request import PlanRequest
from armillary.plans import DEPARTURES, EXACT, Choice, Profile, StageFact
from planning_cases import dense, machines, model, table

MIB = 1 << 20
TABLE = 64 * MIB  # of 131,072 rows of 512 B


def wide(name="t", arrival=0, alpha=0.01, **more):
    return table(name, arrival, rows=131_072, width=128, alpha=alpha, union=1.0, **more)


FAST = {"megabits": 100_000}  # where tables go whole, 256 MiB with Adam, if rows are slow to find
SLOW_ROWS = {"assumptions": replace(ADAM, row_seconds=1e-4)}


def test_without_a_limit_the_table_goes_whole_where_its_rows_are_slow_to_find():
    assert plan(model(wide()), machines(4, **FAST), **SLOW_ROWS).group_of("t").exchange.name == "all_reduce"


def test_a_limit_makes_it_shard_and_says_what_was_given_up():
    topology = machines(4, memory=100 * MIB, **FAST)
    made = plan(model(wide()), topology, **SLOW_ROWS)
    assert made.group_of("t").layout == "row_sharded"
    assert made.forecast.memory_bytes <= 100 * MIB
    assert re.search(r"all_reduce, [\d.]+ ms, does not fit in memory", made.group_of("t").reason)
    lost = {str(v.candidate.choice): v.lost for v in explain(Case(model(wide()), topology, **SLOW_ROWS), PlanRequest())}
    assert re.fullmatch(r"needs [\d.]+ MiB more, which do not fit", lost["all_reduce"])


def test_only_as_much_is_given_up_as_must_be():
    profile = model(wide("t", 0), wide("u", 1))
    made = plan(profile, machines(4, memory=400 * MIB, **FAST), **SLOW_ROWS)
    assert sorted(group.layout for group in made.groups) == ["replicated", "row_sharded"]


def test_what_costs_least_is_given_up_first():
    """Sharding costs more seconds where more rows travel."""
    for alphas in ((0.012, 0.01), (0.01, 0.012)):
        profile = model(*[wide(name, i, alpha) for i, (name, alpha) in enumerate(zip("tu", alphas, strict=True))])
        made = plan(profile, machines(4, memory=400 * MIB, **FAST), **SLOW_ROWS)
        layouts = [made.group_of(name).layout for name in "tu"]
        assert layouts[alphas.index(0.01)] == "row_sharded" and layouts[alphas.index(0.012)] == "replicated"


def test_activations_and_frozen_parameters_take_room_too():
    cold = dense("cold", 8 * MIB, arrival=None, requires_grad=False)
    limit = machines(4, memory=290 * MIB, **FAST)
    assert plan(model(wide()), limit, **SLOW_ROWS).group_of("t").layout == "replicated"
    assert plan(model(wide(), cold, activations=30 * MIB), limit, **SLOW_ROWS).group_of("t").layout == "row_sharded"


def remedies(profile, topology, **wishes):
    with pytest.raises(ValueError, match="nothing fits") as refused:
        plan(profile, topology, **wishes)
    return str(refused.value)


def test_more_workers_are_as_many_as_are_needed():
    """64 MiB with Adam are 256 MiB over N: 26 workers for 10 MiB, and no fewer."""
    few = model(wide(alpha=1e-4))  # whose rows on their way are next to nothing
    said = remedies(few, machines(4, memory=10 * MIB))
    workers = int(re.search(r"\d+\. (\d+) workers in \d+ node", said).group(1))
    assert workers == 26
    assert plan(few, machines(workers, memory=10 * MIB)).forecast.memory_bytes <= 10 * MIB
    remedies(few, machines(workers - 1, memory=10 * MIB))


def test_a_constraint_in_the_way_is_named():
    said = remedies(model(wide()), machines(4, memory=100 * MIB), constraints={"t": "replicated"})
    assert re.search(r"layout row_sharded for 't', by dropping the constraint: [\d.]+ MiB", said)
    assert "workers in" not in said  # no number of them would do: the table is whole on every rank


def test_lazy_is_named_where_it_helps():
    profile = model(table("t", rows=131_072, width=128, alpha=0.001, union=0.004))
    limit = machines(4, memory=50 * MIB)
    said = remedies(profile, limit)
    assert "lazy=['t']" in said and "NOT exact" in said
    assert plan(profile, limit, lazy=["t"]).forecast.memory_bytes <= 50 * MIB


def test_a_smaller_batch_is_named_with_its_factor():
    profile = model(dense("d", MIB), activations=90 * MIB)  # 16 MiB with Adam
    said = remedies(profile, machines(4, memory=46 * MIB))
    assert "batches 3.0 times smaller, whose activations take 30.0 MiB" in said


def test_the_last_remedy_is_the_memory_that_would_do():
    said = remedies(model(dense("d", MIB)), machines(4, memory=MIB))
    assert said.splitlines()[1:] == ["  1. ranks with 16.1 MiB of memory"]  # weight, gradient, two moments; and a flag
    assert plan(model(dense("d", MIB)), machines(4, memory=int(16.1 * MIB))).workers == 4


def test_the_rule_does_not_fit_what_it_does_not_price():
    tables = [table(f"t{i}", i, rows=131_072, width=128, refusals=("max_norm",)) for i in range(2)]
    with pytest.raises(ValueError, match="nothing fits"):
        plan_by_rule(Case(model(*tables), machines(4, memory=TABLE), ADAM), PlanRequest())


def test_where_neither_more_workers_nor_smaller_batches_will_do_both_are_named():
    """64 MiB with Adam over N and 40 MiB of activations in 20 MiB: no number of workers holds the activations, and 4
    workers have no room for any batch (64 MiB each)."""
    few = wide(alpha=1e-4)
    profile, limit = model(few, activations=40 * MIB), 20 * MIB
    said = remedies(profile, machines(4, memory=limit))
    workers, factor, room = re.search(
        r"(\d+) workers in \d+ node\(s\) with batches ([\d.]+) times smaller, whose activations take ([\d.]+) MiB", said
    ).groups()
    assert "by itself" not in said and not re.search(r"workers in \d+ node\(s\):", said)
    assert float(factor) == pytest.approx(40 / float(room), rel=0.1)
    small = model(few, activations=int(float(room) * MIB * 0.99))
    assert plan(small, machines(int(workers), memory=limit)).forecast.memory_bytes <= limit
    with pytest.raises(ValueError, match="nothing fits"):
        plan(model(few, activations=40 * MIB // 64), machines(int(workers) - 1, memory=limit))


def test_where_one_of_them_will_do_both_are_not_named():
    said = remedies(model(wide(alpha=1e-4), activations=5 * MIB), machines(4, memory=20 * MIB))
    assert re.search(r"workers in \d+ node\(s\): ", said) and "with batches" not in said


def test_as_many_micro_batches_are_named_as_make_up_the_batch():
    said = remedies(model(dense("d", MIB), activations=90 * MIB), machines(4, memory=42 * MIB))
    assert (
        "batches 3.5 times smaller" in said and "(4 micro-batches accumulated under run.no_sync() are one step)" in said
    )


def test_a_stage_a_worker_is_named_where_it_would_fit_and_says_where_it_is_late():
    """Four layers of 16 MiB with Adam (64 MiB) each: whole 256 MiB, in stages 64, or 80 where old weights are kept."""
    facts = [replace(dense(f"{i}.weight", 4 * MIB, 3 - i), stage=str(i)) for i in range(4)]
    stages = tuple(StageFact(str(i), 100, 16 * MIB, 0, 0.1, 0.2, 8) for i in range(4))
    profile = Profile(tuple(facts), stages, batches=4, workers=4)
    said = remedies(profile, machines(4, memory=100 * MIB))
    found = re.findall(
        r"layout stage_sharded, a stage a worker, by schedule (\w+) \((.*)\): ([\d.]+) MiB on the fullest worker", said
    )
    assert [(name, float(held)) for name, _, held in found] == [("gpipe", 64), ("one_f_one_b", 64), ("pipeline", 80)]
    assert [says for _, says, _ in found] == [EXACT, EXACT, DEPARTURES["stale"]]
    for name, says, held in found:
        made = plan(profile, machines(4, memory=100 * MIB), schedule=Choice(name))
        assert float(held) == max(group.forecast.memory_bytes for group in made.groups) * 4 / MIB
        assert ("NOT exact" in says) == bool(made.departures)
    tight = remedies(profile, machines(4, memory=70 * MIB))
    assert "schedule gpipe" in tight and "schedule pipeline" not in tight
    assert "stage_sharded" not in remedies(profile, machines(4, memory=60 * MIB))
