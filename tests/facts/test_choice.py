"""A choice is typed as it prints, and what is none is quoted with the place where it stops being one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.plans import Choice

NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
TEXTS = st.text("ab1.-_ ,()[]=", max_size=6) | st.sampled_from(["features.1", "1.10", "None", "True", "3", "it's"])
SCALARS = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none() | TEXTS


def choices(values):
    return st.builds(Choice, NAMES, st.dictionaries(NAMES, values, max_size=3))


VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | choices(inner), max_leaves=6)


@given(choices(VALUES))
def test_any_choice_reads_back_from_what_it_prints(choice):
    assert Choice.parse(str(choice)) == choice


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("ring", Choice("ring")),
        ("ring()", Choice("ring")),
        ("1f1b", Choice("1f1b")),
        (" ring ( slack = 1 ) ", Choice("ring", {"slack": 1})),
        ("pipeline(points=[features.1,layers.2], clip_norm=0.5)",
         Choice("pipeline", {"points": ["features.1", "layers.2"], "clip_norm": 0.5})),
        ("pipeline(points=['a b'])", Choice("pipeline", {"points": ["a b"]})),
        ("ring(costs=[[1, 2], [2, 5]])", Choice("ring", {"costs": [[1, 2], [2, 5]]})),
        ("local(inner=ring(slack=1), every=4)", Choice("local", {"inner": Choice("ring", {"slack": 1}), "every": 4})),
        ("hadamard(quantize(bits=4))", Choice("hadamard", {"of": Choice("quantize", {"bits": 4})})),
        ("hadamard(one_bit(), wire=scattered)", Choice("hadamard", {"of": Choice("one_bit"), "wire": "scattered"})),
        ("hadamard(of=one_bit)", Choice("hadamard", {"of": "one_bit"})),
        ("a(b=True, c=None, d=-1.5)", Choice("a", {"b": True, "c": None, "d": -1.5})),
    ],
)  # fmt: skip
def test_it_is_read_as_a_user_types_it(text, meant):
    assert Choice.parse(text) == meant


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at its end, want a value"),
        ("ring(", r"at its end, want '\)'"),
        ("ring(slack)", r"at '\)', want '='"),
        ("ring(slack=)", r"at '\)', want a value"),
        ("ring(slack=1 stages=2)", "at 'stages', want ','"),
        ("ring(slack=1) ring", "at 'ring', want nothing more"),
        ("ring(points=[a", "at its end, want ']'"),
        ("[ring]", "want a name, as in ring"),
        ("3", "want a name, as in ring"),
        ("ring(a='b)", "at"),
        ("ring(a=1, a=2)", "every option once"),
        ("hadamard(one_bit(), of=one_bit)", "every option once"),
    ],
)
def test_what_is_no_choice_is_quoted_with_the_place(text, said):
    with pytest.raises(ValueError, match=f"is no NAME or NAME.*: .*{said}") as refused:
        Choice.parse(text)
    assert repr(text) in str(refused.value)


def test_options_given_as_arguments_are_refused_with_the_way_to_give_them():
    with pytest.raises(TypeError, match=r"together, as in Choice\('quantize', {'bits': 8}\)"):
        Choice("quantize", bits=8)


@pytest.mark.parametrize(
    ("asked", "found", "is_allowed"),
    [
        ("quantize", "quantize(bits=8)", True),
        ("quantize(bits=8)", "quantize(bits=8, wire=scattered)", True),
        ("quantize(bits=8)", "quantize(bits=4)", False),
        ("quantize(bits=8, wire=scattered)", "quantize(bits=8)", False),
        ("hadamard(quantize(bits=8))", "hadamard(quantize(bits=8), wire=scattered)", True),
        ("top_k", "quantize", False),
    ],
)
def test_options_left_out_stay_open(asked, found, is_allowed):
    assert Choice.parse(asked).allows(Choice.parse(found)) == is_allowed
