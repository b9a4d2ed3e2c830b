"""A table is no wider than a page: text is folded, numbers never are, and nothing of a cell is lost."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.plans import Table, page_text
from armillary.plans.units import WIDTH, wrapped

NAMES = st.text("abc._/ (", min_size=1, max_size=70).map(str.strip)
NUMBERS = st.integers(0, 10**9).map(lambda number: f"{number:,}")


def bare(text):
    return re.sub(r"\s", "", text)


@given(st.lists(st.tuples(NAMES, NAMES, NUMBERS, NUMBERS), min_size=1, max_size=4), st.integers(46, 120))
def test_a_table_keeps_to_the_width_and_loses_nothing(rows, width):
    """From 46 on: two columns of text of 8, numbers of 11 and 13, and gaps."""
    table = Table(("name", "exchange", "sent kB/step", "time ms"), rows, (0, 1))
    folded = table.folded(width)
    for before, after in zip(rows, folded.rows, strict=True):
        assert list(map(bare, before)) == list(map(bare, after))
        assert list(before[2:]) == list(after[2:])
    cells = [[row[column] for row in (folded.header, *folded.rows)] for column in range(4)]
    assert sum(max(len(line) for cell in column for line in cell.split("\n")) for column in cells) + 6 <= width
    assert all(len(line) <= WIDTH and line == line.rstrip() for line in str(table).splitlines())


def test_what_fits_stays_on_one_line_and_what_does_not_is_broken_behind_a_mark():
    fits = Table(("group", "ms"), [("bucket 0", "1.50")])
    assert str(fits) == "group       ms\n--------  ----\nbucket 0  1.50"
    name = "transformer.encoder.layers.11.self_attention.in_proj_weight" * 2
    lines = str(Table(("group", "time ms"), [(name, "1.50")])).splitlines()
    *_, first, second = lines
    assert first.endswith("1.50") and max(map(len, lines)) <= WIDTH
    assert first.split()[0][-1] in "._" and first.split()[0] + second.strip() == name


def test_a_number_is_never_broken_at_its_point():
    rows = [(f"{'w' * at} from 1.35 to 1.65, want 12,345", "1") for at in range(80, 110)]
    for cell, _ in Table(("said", "n"), rows).folded().rows:
        assert not re.search(r"\d[.,]\n\d", cell), cell


def test_headers_of_numbers_give_way_before_names_do():
    table = Table(("group", "largest difference of all"), [("n" * 84, "1.0e-10")])
    lines = str(table).splitlines()
    assert lines[-1] == "n" * 84 + "1.0e-10".rjust(15) and len(lines) == 5
    assert " ".join(line.strip() for line in lines[:3]).endswith("largest difference of all")


def test_paragraphs_are_broken_between_words_and_pictures_are_left_alone():
    long = "word " * 40
    text = page_text([long.strip(), Table(("a",), [("b",)]), "one\n  two"])
    assert max(map(len, text.splitlines())) <= WIDTH and bare(text).startswith(bare(long))
    assert text.endswith("\n\none\n  two") and wrapped("x" * 150) == "x" * 150


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="want 2 cells in every row"):
        Table(("a", "b"), [("c",)])
