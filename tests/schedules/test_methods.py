"""Laws of every registered schedule on its own examples, and of what a plan writes down of a schedule."""

import json
from dataclasses import replace

import pytest

from armillary.contracts.schedule import SCHEDULE_RULES
from armillary.plans import DATA, SIMULTANEOUS, Choice, Group, Mesh, Plan, StagePlan
from armillary.schedules import SCHEDULES, StageLoad, options_of, owns_loop, read
from armillary.schedules.costs import counted
from armillary.schedules.registry import has_clock, tables_stay_whole

EXAMPLES = [
    (name, example["workers"], {key: value for key, value in example.items() if key != "workers"})
    for name, method in SCHEDULES.all().items()
    for example in method.examples
]
every_example = pytest.mark.parametrize(("name", "workers", "given"), EXAMPLES)
GROUP = Group("all", ("w",), "replicated", Choice("all_reduce"))


def test_there_are_these_and_every_one_has_examples():
    assert set(SCHEDULES.all()) == {
        "accumulation", "asynchronous", "delayed_all_reduce", "gpipe", "local_losses", "one_device", "one_f_one_b",
        "pipeline", "ring", "shared_stages", "simultaneous", "zero_ring",
    }  # fmt: skip
    assert {name for name, _, _ in EXAMPLES} == set(SCHEDULES.all())
    assert [name for name in SCHEDULES.all() if not owns_loop(Choice(name))] == [SIMULTANEOUS.name]
    assert [name for name in SCHEDULES.all() if not has_clock(Choice(name))] == ["asynchronous"]


@pytest.mark.parametrize("rule", SCHEDULE_RULES)
@every_example
def test_a_schedule_keeps_the_rules(name, workers, given, rule):
    assert SCHEDULE_RULES[rule](read(Choice(name, given), workers), workers) == ""


@every_example
def test_what_a_plan_writes_down_reads_back_as_the_same_options(name, workers, given):
    options = read(Choice(name, given), workers)
    written = {**options.as_options(), **({"stages": options.stages} if options.method.is_cut else {})}
    assert read(Choice(name, json.loads(json.dumps(written))), workers) == options
    assert read(Choice.parse(str(Choice(name, written))), workers) == options


@every_example
def test_every_micro_batch_is_handed_in_once_per_replica(name, workers, given):
    options = read(Choice(name, given), workers)
    total, axis = options.total(workers), options.method.axis
    handed_in = [options.handed_in(rank, workers) for rank in range(workers)]
    if axis == DATA:  # each process has data of its own
        assert sorted(number for one in handed_in for number in one) == list(range(total))
        assert len({len(one) for one in handed_in}) == 1
    else:  # all of them are one replica
        assert all(list(one) == list(range(total)) for one in handed_in)
    replicas = workers if options.method.replicates_table else 1
    assert total == replicas * options.schedule().micro_batches


@every_example
def test_processes_are_those_of_the_table_and_a_stages_owner_is_one_of_them(name, workers, given):
    options = read(Choice(name, given), workers)
    schedule = options.schedule()
    assert schedule.stages == options.stages and schedule.micro_batches == options.micro_batches
    assert all(0 <= options.where.owner(stage) < workers for stage in range(options.stages))
    assert bool(options.picture()) == options.method.owns_loop
    counts = counted(options)
    assert all(0 <= one.sender < workers and 0 <= one.stage < options.stages and one.times > 0 for one in counts.sent)


@every_example
def test_a_step_is_no_faster_than_all_processes_at_work_and_no_slower_than_one_at_a_time(name, workers, given):
    options = read(Choice(name, given), workers)
    together, count = workers // options.replicas(workers), options.micro_batches
    for seconds in ([1.0 + stage for stage in range(options.stages)], [1.0] * options.stages):
        work, slowest = sum(seconds) * count, max(seconds) * options.stages * count
        assert work / together * (1 - 1e-9) <= counted(options).pace(seconds) <= slowest * (1 + 1e-9)


def test_paces_and_peaks_by_hand():
    """Four micro-batches through three equal stages of 2 s: a flush takes M + K - 1 turns, without one it takes M."""
    loads = [StageLoad("a", "a", 0, 2.0, 0, 0, 10**stage, 0) for stage in range(3)]
    found = {}
    for name in ("gpipe", "one_f_one_b", "pipeline", "accumulation"):
        counts = counted(read(Choice(name, {"micro_batches": 4, "stages": 3}), 3))
        found[name] = round(counts.pace([2.0] * 3), 6), counts.peak(loads)
    assert found == {
        "gpipe": (12.0, 400), "one_f_one_b": (12.0, 100), "pipeline": (8.0, 100), "accumulation": (24.0, 111),
    }  # fmt: skip


def test_owners_by_hand():
    def owners(name, workers, **options):
        made = read(Choice(name, options), workers)
        return [made.where.owner(stage) for stage in range(made.stages)]

    assert owners("pipeline", 3) == owners("gpipe", 3) == owners("one_f_one_b", 3) == [0, 1, 2]
    assert owners("one_device", 3, stages=2) == owners("accumulation", 3, stages=2) == [0, 0]
    assert owners("ring", 3) == owners("zero_ring", 3)


@pytest.mark.parametrize(
    ("name", "options", "workers", "said"),
    [
        ("rign", {}, 2, "no schedule 'rign'; there are .*; did you mean 'ring'"),
        ("cyclic", {"mode": "ring"}, 2, "no schedule 'cyclic'"),
        ("simultaneous", {"slack": 1}, 2, "simultaneous has no slack; it may have no options"),
        ("ring", {"micro_batches": 3}, 2, "ring on 2 processes has micro_batches=2, got 3; drop micro_batches"),
        ("pipeline", {"points": ["a", "b"]}, 2, r"2 stages have 1 cuts between them, got points \('a', 'b'\)"),
        ("pipeline", {"points": [1.1]}, 2, "points are paths of modules, got 1.1; put it in quotes"),
        ("delayed_all_reduce", {"bucket_bytes": -1}, 2, "bucket_bytes >= 0"),
        ("delayed_all_reduce", {"clip_norm": -1.0}, 2, "clip wants a positive norm"),
        ("accumulation", {"micro_batches": 0}, 1, "micro_batches >= 1"),
    ],
)
def test_options_that_cannot_be_are_refused(name, options, workers, said):
    with pytest.raises(ValueError, match=said):
        read(Choice(name, options), workers)


def test_children_of_a_sequential_are_typed_without_quotes():
    for text in ("pipeline(points=[2])", "pipeline(points=['2'])"):
        assert read(Choice.parse(text), 2).points == ("2",)
    assert str(Choice("pipeline", {"points": ["2", "a.1"]})) == "pipeline(points=['2', a.1])"


STAGED = Plan(
    Mesh.of(stage=2),
    (GROUP,),
    "0",
    schedule=Choice("pipeline", {"micro_batches": 3}),
    stages=(StagePlan("a", residency=Choice("recompute")), StagePlan("c")),
)


def test_the_stage_table_says_where_the_schedule_cuts_and_recomputes():
    options = options_of(STAGED)
    assert (options.points, options.recompute, options.stages, options.micro_batches) == (("c",), (0,), 2, 3)
    assert options_of(Plan.from_json(STAGED.to_json())) == options
    assert options_of(replace(STAGED, stages=())).points == ()


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"points": ["b"]}, r"has points=\['b'\], the stage table says \['c'\]; drop points"),
        ({"recompute": [1]}, r"has recompute=\[1\], the stage table says \[0\]; drop recompute"),
        ({"stages": 3}, "has stages=3, the stage table says 2; drop stages"),
    ],
)
def test_options_that_contradict_the_stage_table_are_refused(said, complaint):
    with pytest.raises(ValueError, match=complaint):
        options_of(replace(STAGED, schedule=Choice("pipeline", said)))
    agreeing = {"points": ["c"], "recompute": [0], "stages": 2}
    assert options_of(replace(STAGED, schedule=Choice("pipeline", {**agreeing, "micro_batches": 3}))) == options_of(
        STAGED
    )


def test_a_stage_table_of_another_number_of_workers_is_refused():
    with pytest.raises(ValueError, match="pipeline on 3 processes has stages=3, got 2"):
        options_of(replace(STAGED, mesh=Mesh.of(stage=3)))
    with pytest.raises(ValueError, match="with 2 stages lies on a mesh data 2 x stage 2, the plan's is stage 4; plan"):
        options_of(replace(STAGED, mesh=Mesh.of(stage=4)))


def test_a_plan_with_a_table_by_row_is_refused_by_every_schedule_that_owns_the_loop():
    for name, workers, given in EXAMPLES:
        table = Group("t", ("t",), "row_sharded", Choice("owned_rows"))
        made = replace(STAGED, mesh=Mesh.of(data=workers), schedule=Choice(name, given), stages=(), groups=(table,))
        if not owns_loop(made.schedule) or SCHEDULES[name].placement.deals_rows:
            options_of(made)
            continue
        with pytest.raises(ValueError, match=f"schedule {name} keeps tables whole, so t cannot go by row: plan again"):
            options_of(made)
        accumulates = "run.no_sync" in tables_stay_whole(made.schedule, ["t"])
        assert accumulates == (name in ("accumulation", "one_device"))
