"""The table of simulated beside measured, by hand."""

import math

from benchmarks.played.run import off, page, table


def test_a_row_says_both_and_their_ratio_and_what_is_not_played_is_off():
    rows = {
        "ring": {"played": 0.11, "measured": 0.1, "blocks": [0.09, 0.1, 0.2]},
        "zero_ring": {"played": None, "measured": 0.1, "blocks": [0.1]},
    }
    lines = table({"100 Mbit/s": rows}).splitlines()
    assert lines[2:] == [
        "| 100 Mbit/s | ring | 110.0 | 100.0 (90-200) | 1.10 |",
        "| 100 Mbit/s | zero_ring | not played | 100.0 (100-100) |  |",
    ]
    assert off(rows["ring"]) < 0.11 and off(rows["zero_ring"]) == math.inf


def test_the_bar_of_a_link_is_its_worst_schedule():
    found = {"100 Mbit/s": {"machine": "a machine", "rows": {
        "ring": {"played": 0.08, "measured": 0.1, "blocks": [0.1]},
        "zero_ring": {"played": 0.1, "measured": 0.1, "blocks": [0.1]},
    }}}  # fmt: skip
    text = page(found)
    assert text.startswith("2 hosts of one rank; a machine\n") and " | 15 or less | 20.00 | **miss** |" in text
    assert " | 15 or less | - | not measured |" in text
