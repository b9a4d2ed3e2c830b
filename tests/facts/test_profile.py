"""A profile is frozen, refuses nonsense, survives JSON, and prints as aligned tables with the largest first."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.plans import (
    ParameterFact,
    Profile,
    RowFacts,
    StageFact,
    bytes_text,
    count_text,
    model_fingerprint,
    seconds_text,
)

ROWS = RowFacts(
    rows=1000,
    row_bytes=256,
    lookups=1.5,
    ids=640.25,
    alpha_worker=0.01,
    alpha_node=0.02,
    alpha_union=0.05,
    hottest=((3, 0.25), (999, 0.125)),
    load_modulo=(0.5, 0.5),
    load_hashed=(0.375, 0.625),
    load_blocks=(0.75, 0.25),
    padding_idx=0,
)
TABLE = ParameterFact(
    "table.weight", (1000, 64), "float32", 256_000, True, "rows", "table", ("tied.weight",), arrival=2, rows=ROWS
)
HEAD = ParameterFact(
    "head.weight", (64, 64), "float32", 16_384, True, "dense", "head", dense_readers=("mm",), arrival=0
)
SCALE = ParameterFact("scale", (), "float64", 8, False, "never")
STAGES = (StageFact("table", 0, 256_000, 5120, 1e-4, 2e-4), StageFact("head", 8192, 16_384, 4096, 0.5, 1.5))
PROFILE = Profile((SCALE, HEAD, TABLE), STAGES, batches=8, workers=2)


def test_a_profile_survives_json() -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE


def test_a_profile_survives_a_file(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == PROFILE


@given(
    alphas=st.lists(st.floats(0, 1), min_size=3, max_size=3).map(sorted),
    hottest=st.lists(st.tuples(st.integers(0, 999), st.floats(0, 1)), max_size=3).map(tuple),
    padding=st.none() | st.integers(0, 999),
    repeated=st.none() | st.floats(0, 1),
)
def test_any_row_facts_survive_json(
    alphas: list[float], hottest: tuple[tuple[int, float], ...], padding: int | None, repeated: float | None
) -> None:
    worker, node, union = alphas
    rows = replace(ROWS, alpha_worker=worker, alpha_node=node, alpha_union=union, hottest=hottest, padding_idx=padding)
    rows = replace(rows, repeated=repeated)
    profile = replace(PROFILE, parameters=(replace(TABLE, rows=rows),))
    assert Profile.from_json(profile.to_json()) == profile


def test_a_file_that_does_not_say_how_many_rows_repeat_is_read() -> None:
    fields = json.loads(PROFILE.to_json())
    del fields["parameters"][2]["rows"]["repeated"]
    assert Profile.from_json(json.dumps(fields)) == PROFILE


def test_an_edited_file_that_is_another_model_is_refused() -> None:
    fields = json.loads(PROFILE.to_json())
    fields["parameters"][1]["shape"] = [64, 65]
    with pytest.raises(ValueError, match="says fingerprint"):
        Profile.from_json(json.dumps(fields))


def test_a_profile_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        PROFILE.batches = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"shape": (32, 128)},
        {"dtype": "float16"},
        {"reads": "both"},
        {"requires_grad": False},
        {"aliases": ("tied",)},
    ],
)
def test_the_fingerprint_tells_models_apart(change: dict[str, object]) -> None:
    assert replace(PROFILE, parameters=(SCALE, replace(HEAD, **change), TABLE)).fingerprint != PROFILE.fingerprint


def test_the_fingerprint_is_of_the_model_and_not_of_what_was_measured() -> None:
    measured = replace(TABLE, rows=replace(ROWS, alpha_worker=0.005), arrival=None)
    other = Profile((SCALE, HEAD, measured), (), batches=4, workers=4)
    assert other.fingerprint == PROFILE.fingerprint


def test_a_plan_is_made_for_what_is_trained_whatever_reads_it() -> None:
    trained = [("head.weight", (64, 64), "float32"), ("table.weight", (1000, 64), "float32")]
    assert PROFILE.model_fingerprint == model_fingerprint(trained)


def test_model_alpha_weighs_by_elements_and_leaves_out_what_never_travels() -> None:
    assert PROFILE.alpha == pytest.approx((64_000 * 0.01 + 4096) / (64_000 + 4096))
    never_read = replace(SCALE, requires_grad=True)
    assert replace(PROFILE, parameters=(never_read, HEAD, TABLE)).alpha == PROFILE.alpha
    assert replace(PROFILE, parameters=(SCALE,)).alpha == 1.0


def test_bytes_are_split_by_how_they_are_read() -> None:
    assert (PROFILE.row_bytes, PROFILE.dense_bytes, PROFILE.parameter_bytes) == (256_000, 16_384, 272_392)


def test_parameters_are_found_by_any_of_their_names() -> None:
    assert PROFILE.parameter("tied.weight") is TABLE
    with pytest.raises(KeyError, match=r"there are scale, head.weight, table.weight"):
        PROFILE.parameter("nowhere")


def test_arrivals_are_in_order_and_leave_out_what_has_no_gradient() -> None:
    assert PROFILE.arrivals == (HEAD, TABLE)


@pytest.mark.parametrize(
    ("fact", "change", "complaint"),
    [
        (ROWS, {"alpha_worker": 0.03}, "want 0 <= alpha worker <= node <= union <= 1"),
        (ROWS, {"alpha_union": 1.5}, "want 0 <= alpha"),
        (ROWS, {"load_modulo": (0.5, 0.4)}, "load_modulo must be shares that add up to 1"),
        (ROWS, {"load_blocks": (1.5, -0.5)}, "load_blocks must be shares"),
        (ROWS, {"repeated": 1.5}, "repeated is a share between 0 and 1"),
        (TABLE, {"rows": None}, "row facts go with 'rows'"),
        (TABLE, {"reads": "dense"}, "row facts go with 'rows'"),
        (TABLE, {"reads": "sparse"}, "want one of"),
        (TABLE, {"shape": (999, 64)}, "has not 1000 rows"),
        (STAGES[0], {"activation_bytes": -1}, "negative activation_bytes"),
        (PROFILE, {"workers": 3, "workers_per_node": 2}, "3 workers do not fill nodes of 2"),
        (PROFILE, {"workers": 9}, "9 workers need a batch each, got 8"),
        (PROFILE, {"parameters": (HEAD, HEAD)}, "more than once: head.weight"),
        (PROFILE, {"parameters": (TABLE, replace(HEAD, name="tied.weight"))}, "more than once: tied.weight"),
    ],
)
def test_nonsense_is_refused(fact: object, change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(fact, **change)


def test_a_refused_table_is_read_by_row_and_not_shardable() -> None:
    refused = replace(TABLE, refusals=("max_norm rewrites rows",))
    assert TABLE.shardable and not refused.shardable and not HEAD.shardable
    assert "not shardable: max_norm rewrites rows" in str(replace(PROFILE, parameters=(refused,)))


PICTURE = """
profile {fingerprint}: 3 parameters, 266.0 KiB (250.0 KiB read by row, 16.0 KiB whole)
model alpha 0.0695 over 8 batches; workers: 2, per node: 1

parameter         shape  dtype        bytes  read   arrival  stage    note
------------  ---------  -------  ---------  -----  -------  -------  -----------------------------
table.weight  1000 x 64  float32  250.0 KiB  rows         2  table    also tied.weight; padding row
                                                                      0
head.weight     64 x 64  float32   16.0 KiB  dense        0  head
scale            scalar  float64        8 B  never        -  (model)  frozen

read by row    rows    row  lookups  ids  alpha worker    node   union
------------  -----  -----  -------  ---  ------------  ------  ------
table.weight  1,000  256 B      1.5  640        0.0100  0.0200  0.0500

per worker and step; alpha is distinct rows / rows, merged over a node and over all workers

read by row   load modulo  hashed  blocks  hottest row
------------  -----------  ------  ------  -----------
table.weight         1.00    1.25    1.50    3 (25.0%)

load is the busiest owner's / mean, rows dealt modulo the workers, hashed, or in contiguous blocks

stage  forward FLOP  parameters  activations   forward  backward
-----  ------------  ----------  -----------  --------  --------
table             0   250.0 KiB      5.0 KiB    100 us    200 us
head         8.19 k    16.0 KiB      4.0 KiB  500.0 ms    1.50 s
"""


def test_a_profile_prints_as_a_picture() -> None:
    assert str(PROFILE) == PICTURE.strip().format(fingerprint=PROFILE.fingerprint)


def test_a_long_list_folds_its_smallest_dense_parameters_and_nothing_else() -> None:
    many = tuple(replace(HEAD, name=f"layer{n}", bytes=50 + n, arrival=n) for n in range(30))
    tiny = replace(SCALE, name="tiny", bytes=1)
    text = str(replace(PROFILE, parameters=(*many, TABLE, tiny)))
    assert f"and 10 smaller dense ones, {sum(50 + n for n in range(10))} B" in text
    assert [f"layer{n} " in text for n in range(30)] == [False] * 10 + [True] * 20
    assert "tiny" in text and "table.weight" in text


def test_units_are_chosen_to_be_read() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 5 << 30, 3 << 41)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "6.0 TiB",
    ]
    assert [count_text(n) for n in (0, 999, 1000, 1_210_000_000)] == ["0", "999", "1 k", "1.21 G"]
    assert [seconds_text(s) for s in (0, 0.00025, 0.0123, 2.5)] == ["0 us", "250 us", "12.3 ms", "2.50 s"]
