"""Laws of a plan whose schedule cuts the model: what is written can be carried out, what speaks against it is said."""

from collections import Counter
from dataclasses import replace

import pytest

from armillary.planning.planner import plan
from armillary.plans import Choice, Mesh, Numbers, ParameterFact, Plan, Profile, StageFact, bytes_text
from armillary.schedules import StageLoad, options_of, read
from armillary.schedules.costs import held_copies, mean_copies, peak_over_workers
from armillary.schedules.cyclic import cyclic
from armillary.schedules.shared_stages import SharedPlacement
from planning_cases import LINKS_ONLY, machines, table
from schedule_messages import lent_messages, ring_messages
from schedule_pictures import parse


def chain_of(flops, parameters=100, activations=1000, outputs=80):
    """A model of stages "a", "b", ...; each of one float32 parameter."""
    names = [chr(ord("a") + place) for place in range(len(flops))]
    facts = [
        ParameterFact(f"{name}.weight", (parameters,), "float32", 4 * parameters, True, "dense", name, arrival=-place)
        for place, name in enumerate(names)
    ]
    stages = [
        StageFact(name, cost, 4 * parameters, activations, 1e-3, 2e-3, outputs) for name, cost in zip(names, flops)
    ]
    return Profile(tuple(facts), (*stages, StageFact("", 0, 0, 0, 0, 0)), batches=1)


def planned(name, processes, flops=(100, 100, 100, 100), **options):
    return plan(chain_of(flops), machines(processes), assumptions=LINKS_ONLY, schedule=Choice(name, options))


def points_of(made):
    return [stage.begins for stage in made.stages[1:]]


CASES = [("one_device", 1, {"micro_batches": 4}), ("pipeline", 2, {}), ("pipeline", 3, {"slack": 3}),
         ("ring", 4, {}), ("ring", 3, {"stages": 2, "slack": 1}), ("ring", 1, {"slack": 1}),
         ("zero_ring", 4, {}), ("zero_ring", 2, {"stages": 4, "slack": 2}), ("one_device", 2, {"stages": 4}),
         ("gpipe", 3, {"micro_batches": 4}), ("one_f_one_b", 2, {"micro_batches": 3}),
         ("accumulation", 1, {"micro_batches": 3}), ("accumulation", 2, {"stages": 2})]  # fmt: skip


@pytest.mark.parametrize(("name", "processes", "options"), CASES)
def test_the_picture_of_a_plan_is_the_schedule_of_the_options(name, processes, options):
    made, schedule = planned(name, processes, **options), read(Choice(name, options), processes).schedule()
    assert parse(options_of(made).picture()) == schedule
    assert Plan.from_json(made.to_json()) == made
    assert options_of(Plan.from_json(made.to_json())) == options_of(made)
    assert sorted(made.parameters) == [f"{name}.weight" for name in "abcd"]
    assert len(made.stages) == schedule.stages and made.workers == processes
    assert [group.stage for group in made.groups] == list(range(schedule.stages))
    assert f"schedule {made.schedule};" in str(made) and made.schedule.name == name


@pytest.mark.parametrize(("name", "processes", "options"), CASES)
def test_a_stale_plan_says_that_it_is_not_exact_and_a_fresh_one_that_it_is(name, processes, options):
    made = planned(name, processes, **options)
    stale = any(age for ages in options_of(made).schedule().staleness for age in ages)
    assert stale == ("NOT exact" in str(made)) == any(group.departures == ("stale",) for group in made.groups)
    assert made.departures == ("stale",) * stale
    assert "NOT exact" not in str(planned("ring", 1)) and "NOT exact" not in str(planned("pipeline", 1))


def test_a_plan_says_how_ranks_are_arranged_and_what_is_shown_while_they_differ():
    for name, mesh, consensus in (
        ("pipeline", Mesh.of(stage=3), "owners"), ("gpipe", Mesh.of(stage=3), "owners"),
        ("one_f_one_b", Mesh.of(stage=3), "owners"), ("shared_stages", Mesh.of(stage=3), "owners"),
        ("ring", Mesh.of(data=3), "owners"), ("zero_ring", Mesh.of(data=3), "owners"),
        ("one_device", Mesh.of(data=3), "same"), ("accumulation", Mesh.of(data=3), "same"),
    ):  # fmt: skip
        made = planned(name, 3)
        assert (made.mesh, made.consensus) == (mesh, consensus), name
        carried = made.groups[0].layout == "stage_sharded"
        assert carried == (consensus == "owners") == all(group.exchange is None for group in made.groups), name


def test_stages_stand_in_a_table_with_what_they_cost_and_keep():
    made = planned("pipeline", 2, points=["d"], recompute=[0])
    assert [stage.begins for stage in made.stages] == ["a", "d"] and made.schedule == Choice(
        "pipeline", {"micro_batches": 2}
    )
    assert [stage.residency for stage in made.stages] == [Choice("recompute"), Choice("keep")]
    assert [stage.forecast.seconds for stage in made.stages] == pytest.approx([3 * 3e-3, 3e-3])
    assert [stage.forecast.peak_bytes for stage in made.stages] == [3000, 1000]
    assert options_of(made).points == ("d",) and options_of(made).recompute == (0,)
    assert any(line.split() == ["0", "a", "recompute", "0.0", "9.00"] for line in str(made).splitlines())


def test_corrections_are_printed_and_what_they_remember_is_held():
    plain, made = planned("one_device", 1, slack=2), planned("one_device", 1, slack=2, corrections=["error_feedback"])
    assert "corrections=[error_feedback]" in str(made)
    assert "correction: error_feedback: stages with stale weights" in str(made)
    assert Plan.from_json(made.to_json()) == made and "correction" not in str(plain)
    for before, after in zip(plain.groups, made.groups, strict=True):
        assert after.forecast.memory_bytes - before.forecast.memory_bytes == 4 * 100 * len(after.parameters)
    fresh = planned("pipeline", 1, corrections=["stable_rate", "weight_prediction"])
    assert "no weight read is old, so stable_rate, weight_prediction change nothing" in str(fresh)
    assert [g.forecast for g in fresh.groups] == [g.forecast for g in planned("pipeline", 1).groups]


def test_stages_of_nearly_equal_cost_unless_the_user_cuts():
    assert points_of(planned("ring", 2, flops=(300, 100, 100, 100))) == ["b"]
    assert points_of(planned("ring", 2, points=["d"])) == ["d"]
    with pytest.raises(ValueError, match=r"cannot cut at nowhere.*it has a, b, c, d"):
        planned("ring", 2, points=["nowhere"])
    with pytest.raises(ValueError, match="points must rise"):
        planned("ring", 3, points=["c", "b"])
    with pytest.raises(ValueError, match="4 modules make no 5 stages"):
        planned("ring", 5)


@pytest.mark.parametrize(
    ("name", "processes", "options", "message"),
    [
        (
            "spiral",
            2,
            {},
            "no schedule 'spiral'; there are accumulation, asynchronous, delayed_all_reduce, gpipe, local_losses",
        ),
        ("pipline", 2, {}, "did you mean 'pipeline'"),
        ("zero_ring", 2, {"micro_batches": 3}, "has micro_batches=2, got 3"),
        ("zero_ring", 2, {"recompute": [0]}, "zero_ring has no recompute; it may have clip_by, clip_norm, costs"),
        ("zero_ring", 2, {"corrections": ["stable_rate"]}, "zero_ring has no corrections; it may have"),
        ("one_device", 2, {"corrections": ["error_feedback"]}, "on 2 processes knows no corrections"),
        ("pipeline", 2, {"stages": 3}, "has stages=2, got 3"),
        ("ring", 2, {"micro_batches": 3}, "has micro_batches=2, got 3"),
        (
            "ring",
            2,
            {"slak": 1},
            "ring has no slak; it may have clip_by, clip_norm, costs, micro_batches, points",
        ),
        ("ring", 2, {"mode": "pipeline"}, "ring has no mode"),
        ("ring", 2, {"slack": -1}, "slack >= 0"),
        ("ring", 2, {"recompute": [0]}, "ring has no recompute; it may have"),
        ("pipeline", 2, {"costs": [[1, 2], [1, 2]]}, "pipeline has no costs; it may have"),
        ("pipeline", 2, {"recompute": [2]}, r"recompute names stages \[2\]; there are 2"),
        ("gpipe", 2, {"slack": 1}, "gpipe has no slack; it may have"),
        ("one_f_one_b", 2, {"corrections": ["stable_rate"]}, "one_f_one_b has no corrections"),
        ("accumulation", 2, {"corrections": ["stable_rate"]}, "accumulation has no corrections"),
        ("accumulation", 1, {"slack": 1}, "accumulation has no slack"),
        ("pipeline", 4, {"micro_batches": 2}, "want at least 3 micro-batches"),
        ("shared_stages", 4, {}, r"wants N\(N\+1\)/2 processes for N workers \(1, 3, 6, 10, ...\), got 4; take 3 or 6"),
        ("shared_stages", 3, {"stages": 3}, "has stages=2, got 3"),
        ("shared_stages", 3, {"costs": [[1, 2], [1, 2]]}, "shared_stages has no costs; it may have"),
        ("shared_stages", 3, {"corrections": ["stable_rate"]}, "shared_stages has no corrections; it may have"),
        ("shared_stages", 3, {"clip_norm": 1.0}, "slack=1 is enough"),
    ],
)
def test_options_that_do_not_go_together_are_refused(name, processes, options, message):
    with pytest.raises(ValueError, match=message):
        planned(name, processes, **options)


def test_wishes_that_a_staged_plan_cannot_grant_are_refused():
    ring, late = Choice("ring"), Choice("delayed_all_reduce")
    for wish in ({"lazy": ["a.weight"]}, {"constraints": {"a.weight": "replicated"}}, {"mean": "weights"}):
        with pytest.raises(ValueError, match=f"{next(iter(wish))} have no effect"):
            plan(chain_of((1, 1)), machines(2), schedule=late, **wish)
    for wish, words in (
        ({"lazy": ["a.weight"]}, "a.weight cannot be lazy, since schedule ring keeps tables whole; drop lazy, or plan"),
        ({"constraints": {"a.weight": "replicated"}}, "so no exchange takes part: drop it, or take accumulation"),
        ({"constraints": {"a.weight": "row_sharded"}}, "cannot be row_sharded"),
        ({"mean": "weights"}, "mean have no effect"),
    ):
        with pytest.raises(ValueError, match=words):
            plan(chain_of((1, 1)), machines(2), schedule=ring, **wish)
    with pytest.raises(ValueError, match=r"no schedule 'spiral'; there are .*ring, shared_stages, simultaneous, zero"):
        plan(chain_of((1, 1)), machines(2), schedule=Choice("spiral"))


def test_a_stage_that_keeps_a_table_whole_also_fills_its_gradient():
    chain, speed = chain_of((100, 100, 100, 100)), replace(LINKS_ONLY, memory_bytes_per_second=1e9)
    words = replace(table("a.words", workers=2), stage="a")
    profile = replace(chain, parameters=(*chain.parameters, words))
    schedule = Choice("pipeline", {"micro_batches": 2, "points": ["b"]})
    whole = plan(profile, machines(2), assumptions=speed, schedule=schedule)
    assert whole.compute_seconds == pytest.approx(2 * (3e-3 + 2 * words.bytes / 1e9))
    assert "a schedule keeps tables whole: a.words; without one they may go by row" in whole.notes


def test_the_bytes_of_a_pipeline_are_what_its_stages_return():
    made = planned("pipeline", 3, points=["b", "d"], micro_batches=4)
    assert [group.forecast.sent_bytes * 3 for group in made.groups] == [4 * 80, 4 * 160, 4 * 80]


def notes(name, processes, **options):
    return " ".join(planned(name, processes, **options).notes)


@pytest.mark.parametrize("workers", [2, 4])
def test_accumulation_is_said_to_need_less_memory_with_the_numbers(workers):
    text = notes("one_device", 1, micro_batches=workers, stages=4)
    each = 4 * 1000  # of one micro-batch; N / 2 of them after every tick
    held = workers / 2 * each
    assert f"{bytes_text(held)} with this schedule" in text
    assert f"{bytes_text(workers * each)} with {workers} micro-batches at once" in text
    assert f"{bytes_text(each)} with gradient accumulation" in text
    assert ("needs 50% less" if workers == 4 else "needs no more") in text


@pytest.mark.parametrize("workers", [2, 3, 4, 9, 10])
def test_the_ring_is_held_against_a_delayed_all_reduce_with_the_numbers(workers):
    made = planned("ring", workers, stages=4)
    text, reduced = " ".join(made.notes), 2 * 4 * 400 * (workers - 1) / workers
    sent = Counter(message.sender for message in ring_messages(options_of(made).schedule()))
    assert f"{bytes_text(400 * sent.total() / workers)} round the ring" in text
    assert f"{bytes_text(400 * max(sent.values()))} by the busiest worker" in text
    assert f"{bytes_text(reduced)} by a delayed all-reduce" in text
    assert ("the delayed all-reduce is the better plan" in text) == (3 <= workers <= 9)


def test_a_pipelines_utilisation_is_that_of_its_cut_beside_a_flush_pipelines():
    assert "utilisation of 2 devices: 100% with this cut" in notes("pipeline", 2)
    assert "(1F1B) of 2 micro-batches, exact, would reach 67%" in notes("pipeline", 2)
    assert "utilisation of 2 devices: 67% with this cut" in notes("pipeline", 2, points=["d"])


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("global", "gradients are clipped to a norm of at most 0.5 over all stages, as clip_grad_norm_ does"),
        ("stage", "NOT exact: gradients are clipped stage by stage, each to a norm of its own of at most 0.5"),
        ("previous", "NOT exact: gradients are clipped by the norm over all stages of the step before"),
    ],
)
def test_how_gradients_are_clipped_is_printed(by, said):
    for mode, processes in (("one_device", 1), ("pipeline", 2), ("ring", 2)):
        made = planned(mode, processes, slack=2, stages=2, clip_norm=0.5, clip_by=by)
        shown = "clip_norm=0.5)" if by == "global" else f"clip_norm=0.5, clip_by={by})"  # global is the default
        assert said in str(made) and shown in str(made) and options_of(made).clip.by == by
        assert Plan.from_json(made.to_json()) == made
        assert "clip" not in str(planned(mode, processes))


def test_what_batch_norm_means_is_printed_where_there_is_one():
    facts = chain_of((100, 100))
    for mode, processes, said in (
        ("one_device", 1, "those of each micro-batch on its own; running ones are kept once, in micro-batch order"),
        ("pipeline", 2, "those of each micro-batch on its own; running ones are kept once, in micro-batch order"),
        ("ring", 2, "each worker keeps running ones of its own: held-out data are judged with each worker's"),
    ):
        for running in ((), ("a.norm",), ("a.norm", "b.0", "b.1", "b.2", "b.3")):
            choice = Choice(mode, {"stages": 2})
            with_norms = replace(facts, running=running)
            text = str(plan(with_norms, machines(processes), assumptions=LINKS_ONLY, schedule=choice))
            text = text.replace("\n  ", " ")
            assert (said in text) == bool(running)
            assert ("batch statistics (a.norm)" in text) == (len(running) == 1)
            assert ("(a.norm, b.0, b.1 and 2 more)" in text) == (len(running) == 5)
            assert Profile.from_json(with_norms.to_json()) == with_norms


@pytest.mark.parametrize(("workers", "flops"), [(2, (1, 1)), (3, (1, 1, 1)), (3, (3, 1, 1)), (3, (1, 1, 3))])
def test_shared_devices_stand_beside_those_without_sharing_and_the_pipeline(workers, flops):
    devices = workers * (workers + 1) // 2
    flops = [1000 * one for one in flops]
    made = planned("shared_stages", devices, flops=flops, points=list("bc")[: workers - 1])
    text, sharing = " ".join(made.notes), SharedPlacement(cyclic(workers))
    assert options_of(made).picture() == str(sharing) and made.workers == devices
    pace = max(sum(flops[j:]) / (workers - j) for j in range(workers))
    assert f"{devices} devices for {workers} workers" in text and f"without sharing they would be {workers**2}" in text
    assert f"utilisation: {sum(flops) / pace / devices:.0%} of {devices} devices with this cut" in text
    assert f"({2 / (workers + 1):.0%} with equal stages), {1 / workers:.0%} of {workers**2} without sharing" in text
    assert f"a pipeline reaches {sum(flops) / max(flops) / workers:.0%} of {workers}" in text
    assert f"{bytes_text(1000)} at most, one stage of one micro-batch" in text
    assert f"{bytes_text(1000 * workers)} in the pipeline's fullest" in text
    assert ("the pipeline is better unless" in text) == (pace == max(flops))
    assert (f"take {max(flops) / pace:.2f} times as long" in text) == (pace < max(flops))
    assert made.compute_seconds == pytest.approx(workers * 3e-3)  # what every stage takes


def test_activations_held_are_those_of_the_schedule_of_equal_stages():
    for workers in (2, 3, 4):
        load = StageLoad("", "", 1, 1.0, 0, 0, 1, 0)
        whole = peak_over_workers(cyclic(workers), [load] * workers)
        assert whole == workers * (workers + 1) // 2


@pytest.mark.parametrize(("workers", "stages"), [(2, 2), (2, 4), (4, 4)])
def test_a_zero_ring_says_what_it_holds_and_sends_beside_fully_sharded_data_parallelism(workers, stages):
    made = planned("zero_ring", workers, stages=stages)
    text, schedule = " ".join(made.notes), options_of(made).schedule()
    held = [sum(copies.values()) for worker in range(workers) for copies in held_copies(schedule, worker)]
    size = 1600 / stages
    assert (
        f"the fullest worker holds {bytes_text(size * max(held))} of weights at its peak, of {bytes_text(1600)}" in text
    )
    sent = Counter(message.sender for message in lent_messages(schedule))
    assert f"{bytes_text(size * max(sent.values()))} by the busiest worker" in text
    assert f"{bytes_text(3 * 1600 * (workers - 1) / workers)} by fully sharded data parallelism" in text
    assert ("no less than a plain ring's" in text) == (size * max(held) >= 1600)
    homes = 400 * 4 / workers * (1 + LINKS_ONLY.optimizer_slots)
    tokens = sum(size * mean_copies(schedule, stage) for stage in range(stages))
    assert sum(group.forecast.memory_bytes for group in made.groups) == pytest.approx(homes + tokens)


@pytest.mark.parametrize("count", [2, 16])
def test_what_edges_remember_of_samples_is_forecast_once_however_many_micro_batches_there_are(count):
    """The middle one of three stages has two edges."""
    seen = chain_of((100, 100, 100))
    seen = replace(seen, stages=tuple(replace(one, output_numbers=(Numbers(20, 4),)) for one in seen.stages))
    made = [
        plan(seen, machines(3), assumptions=LINKS_ONLY, schedule=Choice("gpipe", {"micro_batches": count}), edge=edge)
        for edge in (Choice.parse("aq_sgd(quantize(bits=4), cache_mb=2)"), Choice.parse("quantize(bits=4)"))
    ]
    lengths = 2 * 8 * count  # that go ahead of codes
    assert made[0].activation_bytes - made[1].activation_bytes == pytest.approx(2 * 2e6, abs=lengths)
    peaks = [[stage.forecast.peak_bytes for stage in one.stages] for one in made]
    assert [more - less for more, less in zip(*peaks, strict=True)] == pytest.approx([2e6, 4e6, 2e6], abs=lengths)
