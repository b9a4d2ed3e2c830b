"""The page of advice beside measured steps: which pairs count, and which of them came in the order forecast."""

from benchmarks.advice.run import page


def cell(method, forecast, measured):
    return {"method": method, "forecast_seconds": forecast, "seconds": measured}


def test_pairs_count_where_forecasts_differ_by_more_than_a_fifth_and_are_right_where_the_order_is():
    found = {
        "vision": {"bottleneck": "Bottleneck: compute.", "rows": []},
        "vision; a": cell("a", 1.0, 1.0),
        "vision; b": cell("b", 1.1, 0.5),  # too near to a to count
        "vision; c": cell("c", 2.0, 3.0),
        "language_model; a": cell("a", 1.0, 2.0),
        "language_model; c": cell("c", 2.0, 1.0),  # the wrong way round
    }
    lines, (many, share) = page(found)
    assert many.figures == [3] and many.verdict == "**miss**"
    assert share.figures == [2 / 3] and share.verdict == "**miss**"
    assert "| vision | c | 2000.0 | 3000.0 | 0.67 |" in lines and "* vision: Bottleneck: compute." in lines
