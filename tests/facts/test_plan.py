"""A plan is frozen, refuses nonsense, survives JSON whole, and prints as one table."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.facts.plan import UPDATES, Choice, Forecast, Group, Plan, model_fingerprint

EMBEDDING = Group(
    "embedding.weight", ("embedding.weight",), "row_sharded", Choice("owned_rows", {"owners": 2}), "lazy",
    Forecast(1_234_567, 3 << 20, 0.0125), "alpha 0.001: 12.5 ms; next all_reduce, 1.20 s",
)  # fmt: skip
BUCKET = Group(
    "bucket 0", ("head.bias", "head.weight", "lstm.weight"), "replicated", Choice("all_reduce"), "exact",
    Forecast(98_304, 1.5 * (1 << 20), 0.00104), "read whole",
)  # fmt: skip
SINGLE = Group("bucket 1", ("scale",), "replicated", Choice("all_reduce"))
PLAN = Plan(
    4, (BUCKET, EMBEDDING, SINGLE), "0123456789abcdef", "89abcdef", 2, compute_seconds=0.06,
    notes=("no gradient was seen in the profile: scale",),
)  # fmt: skip


def test_a_plan_prints_as_one_table():
    assert str(PLAN) == (Path(__file__).parent / "plan_picture.txt").read_text().rstrip("\n")


def test_the_table_adds_up():
    """Sums of what is shown, compute included, are what the plan forecasts."""
    totals = next(line for line in str(PLAN).splitlines() if line.startswith("step"))
    forecast = PLAN.forecast
    assert totals.split() == [
        "step", str(len(PLAN.parameters)), f"{forecast.sent_bytes / 1e3:,.1f}",
        f"{forecast.memory_bytes / 2**20:,.1f}", f"{forecast.seconds * 1e3:,.2f}",
    ]  # fmt: skip


def test_the_table_says_of_every_group_whether_it_is_exact():
    lines = str(PLAN).splitlines()
    for update, meaning in UPDATES.items():
        names = ", ".join(group.name for group in PLAN.groups if group.update == update)
        assert any(line.startswith(f"{update} (") for line in lines) == bool(names)
        assert not names or f"{update} ({meaning}): {names}" in lines
    exact = replace(PLAN, groups=(BUCKET, SINGLE))
    assert f"exact ({UPDATES['exact']}): all groups" in str(exact).splitlines()
    assert "NOT exact" not in str(exact)


def test_no_line_of_the_table_ends_in_blanks():
    assert all(line == line.rstrip() for line in str(PLAN).splitlines())


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
COSTS = st.builds(Forecast, *[st.floats(0, 1e12)] * 3)
OPTIONS = st.dictionaries(NAMES, st.integers() | st.booleans() | NAMES, max_size=3)


@st.composite
def plans(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=8, unique=True))
    groups, place = [], 0
    while place < len(names):
        is_table = draw(st.booleans())
        count = 1 if is_table else draw(st.integers(1, len(names) - place))
        groups.append(
            Group(
                f"group {place}",
                tuple(names[place : place + count]),
                "row_sharded" if is_table else "replicated",
                Choice(draw(NAMES), draw(OPTIONS)),
                draw(st.sampled_from(list(UPDATES))),
                draw(COSTS),
                draw(NAMES),
            )
        )
        place += count
    per_node, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Plan(
        per_node * nodes,
        tuple(groups),
        model_fingerprint=draw(NAMES),
        topology_fingerprint=draw(NAMES),
        workers_per_node=per_node,
        mean=draw(st.sampled_from(["workers", "weights"])),
        schedule=Choice("cyclic", draw(OPTIONS)),
        compute_seconds=draw(st.floats(0, 10)),
        notes=tuple(draw(st.lists(NAMES, max_size=2))),
    )


@given(plans())
def test_any_plan_survives_json(plan):
    assert Plan.from_json(plan.to_json()) == plan


@given(plans())
def test_any_plan_prints(plan):
    assert all(group.name in str(plan) for group in plan.groups)


def test_a_plan_survives_a_file(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


def test_a_plan_is_frozen():
    with pytest.raises(FrozenInstanceError):
        PLAN.workers = 2


def test_a_group_can_be_edited_and_no_other_changes():
    edited = replace(EMBEDDING, exchange=Choice("owned_rows"), update="exact")
    assert PLAN.with_group(edited).groups == (BUCKET, edited, SINGLE)
    with pytest.raises(ValueError, match=r"no group 'other'; there are bucket 0, embedding.weight, bucket 1"):
        PLAN.with_group(replace(EMBEDDING, name="other"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: replace(PLAN, workers=0), "at least 1 worker, got 0"),
        (lambda: replace(PLAN, workers=3), "3 workers do not fill nodes of 2"),
        (lambda: replace(PLAN, mean="tokens"), "'tokens' is none of workers, weights"),
        (
            lambda: replace(PLAN, groups=(BUCKET, replace(SINGLE, parameters=("head.bias",)))),
            "'head.bias' is in groups",
        ),
        (lambda: replace(BUCKET, parameters=()), "holds no parameter"),
        (lambda: replace(BUCKET, placement="row_sharded"), "must hold one table"),
        (lambda: replace(BUCKET, update="sometimes"), "'sometimes' is none of"),
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
