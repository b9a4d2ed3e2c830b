"""A plan is frozen, refuses nonsense, survives JSON whole, and prints as tables."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.plans import DEPARTURES, EXACT, Axis, Choice, Forecast, Group, Mesh, Plan, StagePlan, model_fingerprint

EMBEDDING = Group(
    "embedding.weight", ("embedding.weight",), "row_sharded", Choice("owned_rows", {"owners": 2}), departures=("lazy",),
    forecast=Forecast(1_234_567, 3 << 20, 0.0125), reason="alpha 0.001: 12.5 ms; next all_reduce, 1.20 s",
)  # fmt: skip
BUCKET = Group(
    "bucket 0", ("head.bias", "head.weight", "lstm.weight"), "replicated", Choice("all_reduce"),
    forecast=Forecast(98_304, 1.5 * (1 << 20), 0.00104), reason="read whole",
)  # fmt: skip
SINGLE = Group("bucket 1", ("scale",), "replicated", Choice("all_reduce"))
PLAN = Plan(
    Mesh.of(data=4), (BUCKET, EMBEDDING, SINGLE), "0123456789abcdef", "89abcdef", 2,
    compute_seconds=0.06, activation_bytes=2.5 * (1 << 20),
    notes=("no gradient was seen in the profile: scale",),
)  # fmt: skip
STAGED = Plan(
    Mesh.of(stage=2),
    (
        Group("stage 0", ("a.weight", "b.weight"), "stage_sharded", None, departures=("stale",)),
        Group("stage 1: c.weight", ("c.weight",), "row_sharded", Choice("owned_rows"), 1, departures=("lazy", "stale")),
    ),
    "0123456789abcdef",
    schedule=Choice("pipeline", {"slack": 1}),
    stages=(
        StagePlan("a", residency=Choice("recompute"), forecast=Forecast(seconds=0.0025, peak_bytes=3 << 20)),
        StagePlan("c", forecast=Forecast(seconds=0.01, peak_bytes=1 << 19)),
    ),
    consensus="owners",
)  # fmt: skip


def test_a_plan_prints_as_one_table():
    assert str(PLAN) == (Path(__file__).parent / "plan_picture.txt").read_text().rstrip("\n")


@pytest.mark.parametrize(
    ("step_ms", "said"),
    [
        (0.0, "time: nothing hidden behind compute\nplan for"),
        (70.0, "; the expected step takes 3.54 ms less than the sum, which are hidden\nplan for"),
        (75.0, "; the expected step takes 1.46 ms more than the sum, as requests slow compute down and ranks wait"),
    ],
)
def test_the_expected_step_is_held_against_the_sum_of_the_table(step_ms, said):
    assert said in str(replace(PLAN, step_seconds=step_ms / 1e3)).replace("\n  ", " ")


def test_a_step_that_prints_as_the_sum_of_the_table_is_not_held_against_it():
    alike = replace(PLAN, step_seconds=PLAN.forecast.seconds + 1e-6, all_reduce_seconds=PLAN.forecast.seconds + 9e-6)
    assert "than the sum" not in str(alike)
    near = replace(PLAN, step_seconds=0.02540, all_reduce_seconds=0.02544)
    assert "25.4 ms a step (all-reduce of everything: the same)" in " ".join(str(near).split())


def test_the_table_adds_up():
    """Sums of what is shown, compute included, are what the plan forecasts."""
    totals = next(line for line in str(PLAN).splitlines() if line.startswith("step"))
    forecast = PLAN.forecast
    assert totals.split() == [
        "step", str(len(PLAN.parameters)), f"{forecast.sent_bytes / 1e3:,.1f}",
        f"{(forecast.memory_bytes + forecast.peak_bytes) / 2**20:,.1f}", f"{forecast.seconds * 1e3:,.2f}",
    ]  # fmt: skip


def unwrapped(plan):
    return str(plan).replace("\n  ", " ")


def test_the_table_says_of_every_group_whether_it_is_exact():
    for plan in (PLAN, STAGED):
        lines = str(plan).splitlines()
        for word, meaning in {"exact": EXACT, **DEPARTURES}.items():
            names = [group.name for group in plan.groups if word in (group.departures or ("exact",))]
            assert any(line.startswith(f"{word} (") for line in lines) == bool(names)
            whose = "all groups" if len(names) == len(plan.groups) else ", ".join(names)
            assert not names or f"{word} ({meaning}): {whose}" in unwrapped(plan)
    exact = replace(PLAN, groups=(BUCKET, SINGLE))
    assert f"exact ({EXACT}): all groups" in str(exact).splitlines()
    assert "NOT exact" not in str(exact) and exact.departures == ()
    assert PLAN.departures == ("lazy",) and STAGED.departures == ("stale", "lazy")


def test_stages_are_a_table_of_their_own_and_columns_stand_only_where_they_say_something():
    lines = str(STAGED).splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("stage  begins"))
    assert [lines[place + row].split() for row in (0, 2, 3)] == [
        ["stage", "begins", "residency", "activations", "MiB", "compute", "ms"],
        ["0", "a", "recompute", "3.0", "2.50"],
        ["1", "c", "keep", "0.5", "10.00"],
    ]
    assert "STALE, LAZY" in str(STAGED) and "(stage 2)" in str(STAGED) and "under pipeline(slack=1): " in lines[0]
    assert "schedule pipeline(slack=1); mean over replicas" in lines
    heads = [next(line for line in str(plan).splitlines() if line.startswith("group ")) for plan in (STAGED, PLAN)]
    assert [" stage " in head for head in heads] == [True, False]
    plain = str(replace(STAGED, stages=tuple(replace(stage, residency=Choice("keep")) for stage in STAGED.stages)))
    assert "residency" not in plain and "begins" in plain and "cadence" not in plain


def test_the_first_lines_say_what_is_done_and_what_a_step_takes_beside_plain_all_reduce():
    words = " ".join(str(PLAN).split("\n\n")[0].split())
    assert words.startswith(
        "4 workers: 4 parameters kept whole on every worker, in 2 groups by all_reduce; embedding.w"
    )
    assert "by owned_rows(owners=2). NOT exact: lazy. Expected: 73.5 ms a step if nothing of it hides" in words
    for mine, plain, said in (
        (0.05, 0.2, "50.0 ms a step (all-reduce of everything: 200.0 ms)"),
        (0.05, 0.05, ": the same)"),
    ):
        assert said in str(replace(PLAN, step_seconds=mine, all_reduce_seconds=plain))
    assert "all-reduce of everything" not in str(replace(PLAN, step_seconds=0.05))


def test_no_line_of_the_table_ends_in_blanks():
    assert all(line == line.rstrip() for line in str(PLAN).splitlines())


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
COSTS = st.builds(Forecast, *[st.floats(0, 1e12)] * 5)
WORDS = st.sets(st.sampled_from(list(DEPARTURES)), max_size=3).map(tuple)
VALUES = st.integers() | st.booleans() | NAMES | st.lists(NAMES, max_size=2)
INNER = st.builds(Choice, NAMES, st.dictionaries(NAMES, VALUES, max_size=2))
OPTIONS = st.dictionaries(NAMES, VALUES | INNER | st.lists(INNER, max_size=2), max_size=3)


@st.composite
def plans(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    choices = st.builds(Choice, NAMES, OPTIONS)
    stages = st.builds(
        StagePlan, NAMES, choices, choices, st.none() | choices, st.none() | choices, choices, COSTS, NAMES
    )
    rows = tuple(draw(st.lists(stages, max_size=3)))
    groups, place = [], 0
    while place < len(names):
        is_table = draw(st.booleans())
        count = 1 if is_table else draw(st.integers(1, len(names) - place))
        groups.append(
            Group(
                f"group {place}",
                tuple(names[place : place + count]),
                "row_sharded" if is_table else draw(st.sampled_from(["replicated", "stage_sharded"])),
                draw(st.none() | choices),
                draw(st.integers(0, max(0, len(rows) - 1))),
                draw(st.sampled_from(["step", "meeting"])),
                draw(WORDS),
                draw(COSTS),
                draw(NAMES),
            )
        )
        place += count
    per_node, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Plan(
        Mesh((Axis("stage", nodes), Axis("data", per_node))),
        tuple(groups),
        model_fingerprint=draw(NAMES),
        topology_fingerprint=draw(NAMES),
        workers_per_node=per_node,
        mean=draw(st.sampled_from(["workers", "weights"])),
        schedule=draw(choices),
        stages=rows,
        consensus=draw(st.sampled_from(["same", "mean", "owners"])),
        compute_seconds=draw(st.floats(0, 10)),
        activation_bytes=draw(st.floats(0, 1e12)),
        notes=tuple(draw(st.lists(NAMES, max_size=2))),
        priced_with=draw(st.dictionaries(NAMES, st.floats(0, 1), max_size=2)),
        step_seconds=draw(st.floats(0, 10)),
        all_reduce_seconds=draw(st.floats(0, 10)),
    )


@given(plans())
def test_any_plan_survives_json(plan):
    assert Plan.from_json(plan.to_json()) == plan


@given(plans())
def test_any_plan_prints(plan):
    assert all(group.name in str(plan) for group in plan.groups)


def test_a_plan_survives_a_file(tmp_path):
    for plan in (PLAN, STAGED):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_is_frozen():
    with pytest.raises(FrozenInstanceError):
        PLAN.mesh = Mesh.of(data=2)


def test_a_group_can_be_edited_and_no_other_changes():
    edited = replace(EMBEDDING, exchange=Choice("owned_rows"), departures=())
    assert PLAN.with_group(edited).groups == (BUCKET, edited, SINGLE)
    with pytest.raises(ValueError, match=r"no group 'other'; there are bucket 0, embedding.weight, bucket 1"):
        PLAN.with_group(replace(EMBEDDING, name="other"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: replace(PLAN, mesh=Mesh.of(data=0)), "1 rank or more, got 'data', 0"),
        (lambda: replace(PLAN, mesh=Mesh.of(data=3)), "3 workers do not fill nodes of 2"),
        (lambda: replace(PLAN, consensus="vote"), "'vote' is none of same, mean, owners"),
        (lambda: replace(STAGED, stages=STAGED.stages[:1]), "'stage 1: c.weight' is of stage 1; there are 1"),
        (lambda: replace(PLAN, groups=(replace(SINGLE, stage=1),)), "'bucket 1' is of stage 1; there are 0"),
        (lambda: replace(PLAN, mean="tokens"), "'tokens' is none of workers, weights"),
        (
            lambda: replace(PLAN, groups=(BUCKET, replace(SINGLE, parameters=("head.bias",)))),
            "'head.bias' is in groups",
        ),
        (lambda: replace(BUCKET, parameters=()), "holds no parameter"),
        (lambda: replace(BUCKET, layout="row_sharded"), "must hold one table"),
        (lambda: replace(BUCKET, layout="sideways"), "'sideways' is none of replicated, row_sharded, stage_sharded"),
        (lambda: replace(BUCKET, departures=("sometimes",)), "sometimes unknown; want some of stale, lazy"),
        (lambda: replace(BUCKET, departures=("exact",)), "exact unknown"),
        (lambda: replace(BUCKET, stage=-1), "want stage >= 0 and cadence step or meeting, got -1"),
        (lambda: replace(BUCKET, cadence="daily"), "cadence step or meeting, got 0, 'daily'"),
        (lambda: replace(BUCKET, prefetch="ids"), "prefetch 'ids'; want none, or for a row_sharded group"),
        (lambda: STAGED.groups[0].own_exchange, "'stage 0' has no exchange; the plan's schedule carries it"),
    ],
)
def test_nonsense_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_the_fingerprint_is_of_the_model_and_not_of_its_order():
    listing = [("a", (2, 3), "float32"), ("b", (4,), "float32")]
    assert model_fingerprint(listing) == model_fingerprint(reversed(listing))
    for other in (("a", (3, 2), "float32"), ("a", (2, 3), "float64"), ("c", (2, 3), "float32")):
        assert model_fingerprint([other, listing[1]]) != model_fingerprint(listing)


def test_a_parameter_is_found_in_its_group():
    assert PLAN.group_of("head.weight") == BUCKET
    with pytest.raises(KeyError, match="no group holds 'nobody'"):
        PLAN.group_of("nobody")


def edited(change):
    given = json.loads(PLAN.to_json())
    change(given)
    return json.dumps(given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (edited(lambda plan: plan.pop("format")), "plan: this plan has another format than 3, .*; plan again"),
        (edited(lambda plan: plan.update(format=1, workers=4)), "plan: this plan has another format than 3, .*"),
        (edited(lambda plan: plan.update(format=4)), "plan: this plan has another format than 3, .*"),
        (edited(lambda plan: plan.update(picture="F0 B0", turn=1)), "plan: plan has no field picture, turn; it has .*"),
        (edited(lambda plan: plan["groups"][0].update(placement="replicated")), "group 'bucket 0' has no field plac.*"),
        (edited(lambda plan: plan["groups"][1].pop("layout")), "plan: group 'embedding.weight' lacks layout"),
        (edited(lambda plan: plan.pop("mesh")), "plan: plan lacks mesh"),
        (edited(lambda plan: plan.update(stages=[{"begin": "a"}])), "plan: stage '' has no field begin; it has .*"),
        (edited(lambda plan: plan.update(stages=[{"reason": "first"}])), "plan: stage '' lacks begins"),
        (
            edited(lambda plan: plan["groups"][0]["forecast"].update(bytes=1)),
            "plan: forecast has no field bytes; it .*",
        ),
        (edited(lambda plan: plan["schedule"].update(mode="ring")), "plan: choice 'simultaneous' has no field mode"),
        (edited(lambda plan: plan["groups"][0].update(exchange={"options": {}})), "plan: choice '' lacks name"),
        ("mesh: 4", r"plan: the text is no JSON \(.*\); want what Plan.save wrote"),
        ("[]", "plan: want a JSON object, as Plan.save writes it, got list"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_sentence(text, said):
    with pytest.raises(ValueError, match=said) as refused:
        Plan.from_json(text)
    assert "\n" not in str(refused.value)


def test_what_a_plan_file_leaves_out_is_the_default():
    group = {"name": "all", "parameters": ["w"], "layout": "replicated", "exchange": {"name": "all_reduce"}}
    given = {"format": 3, "mesh": {"data": 2}, "groups": [group], "model_fingerprint": "0", "stages": [{"begins": "w"}]}
    wanted = Group("all", ("w",), "replicated", Choice("all_reduce"))
    assert Plan.from_json(json.dumps(given)) == Plan(Mesh.of(data=2), (wanted,), "0", stages=(StagePlan("w"),))
