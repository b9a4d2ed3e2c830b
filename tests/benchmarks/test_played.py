"""The table of simulated beside measured, by hand."""

from benchmarks.played.run import is_off, table


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
    assert [is_off(row) for row in rows.values()] == [False, True]
    assert is_off({"played": 0.08, "measured": 0.1}) and not is_off({"played": 0.0851, "measured": 0.1})
