"""Tensors side by side in one flat tensor: where they begin, how long the whole is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.plans import Layout, layout_of
from planning_cases import dense

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5)


def test_lengths_are_those_of_the_tensors_and_the_tail():
    layout = Layout(("a", "b"), ((2, 3), ()), "bfloat16")
    assert (layout.spans, layout.numel, layout.tail) == ([(0, 6), (6, 7)], 7, 2)
    assert (layout.nbytes, layout.joined_bytes) == (14, 18)


def test_aligned_tensors_begin_at_tiles():
    layout = Layout(("a", "b", "c"), ((2, 3), (4,), ()), "float32", align=4, is_guarded=True)
    assert (layout.spans, layout.numel, layout.tail) == ([(0, 6), (8, 12), (12, 13)], 16, 4)


@given(shapes=SHAPES, align=st.integers(1, 7))
def test_no_tile_holds_numbers_of_two_tensors(shapes, align):
    layout = Layout(tuple(map(str, range(len(shapes)))), tuple(shapes), "float32", align)
    tiles = [{number // align for number in range(*span)} for span in layout.spans]
    assert sum(map(len, tiles)) == len(set().union(*tiles)) and layout.numel % align == 0
    assert all(end <= layout.numel for _, end in layout.spans)


def test_the_planner_sees_the_same_lengths():
    layout = layout_of([dense("a", 10), dense("b", 3)], align=4)
    assert layout == Layout(("a", "b"), ((10,), (3,)), "float32", 4) and layout.nbytes == 64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"names": ("a", "a")}, "different names"),
        ({"names": ("a",)}, "a shape for each"),
        ({"align": 0}, "aligned to 1 number or more"),
    ],
)
def test_a_layout_refuses_nonsense(fields, message):
    with pytest.raises(ValueError, match=message):
        Layout(**{"names": ("a", "b"), "shapes": ((1,), (2,)), "dtype": "float32", **fields})
