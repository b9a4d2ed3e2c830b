"""Arithmetic of the planner's grid: regret, noise and errors by hand, and which bars are missed."""

import math

import pytest
from benchmarks.measuring.bars import missed
from benchmarks.planner.cells import SPEEDS, WORKERS, WORKLOADS, Cell, grid
from benchmarks.planner.summary import bars, outcome, report


def found(frozen="all_reduce", seconds=0.11, sent=100.0, memory=50.0):
    """chosen 0.10 and 0.12 s, all_reduce 0.10, gather_rows 0.20 in the first round alone."""
    plans = {"chosen": 0.0, "chosen again": 0.0, "all_reduce": 0.0, "gather_rows": 0.0}
    return {
        "conditions": {"workers": 2},
        "forecast": {
            name: {"sent_bytes": sent, "memory_bytes": memory, "seconds": seconds} for name in plans
        },
        "first": [
            {"mode": name, "sent_bytes": [96.0, 116.0], "sent_payload_bytes": [90.0, 110.0], "wall_seconds": 0.20}
            for name in (*plans, "alone")
        ],
        "turns": {
            "chosen": [0.10, 0.10, 0.30], "chosen again": [0.12, 0.12, 0.12], "all_reduce": [0.1, 0.09, 0.4],
            "alone": [0.05],
        },
        "held_bytes": dict.fromkeys(plans, 40),
        "frozen": frozen,
        "compute_seconds": 0.04,
    }  # fmt: skip


def test_regret_noise_and_errors_by_hand():
    one = outcome("vision_2_100Mbit", found())
    assert one.seconds == {"chosen": pytest.approx(0.12), "all_reduce": 0.1, "gather_rows": 0.20}
    assert one.best == "all_reduce"
    assert one.regret("all_reduce") == 0 and one.regret("chosen") == pytest.approx(0.2)
    assert one.regret("gather_rows") == pytest.approx(1.0)
    assert one.noise == pytest.approx(0.2) and one.compute_error == pytest.approx(-0.2)
    error = one.error("all_reduce")
    assert (error.payload_bytes, error.memory_bytes) == (0.0, pytest.approx(0.25))
    assert error.sent_bytes == pytest.approx(100 / 106 - 1), "with headers, which nobody forecasts"
    assert error.seconds == pytest.approx(0.1)


@pytest.mark.parametrize(("changed", "said"), [
    ({"frozen": "chosen"}, [("within 5%", 0.0), ("regret of", 20.0), ("memory_bytes", 25.0)]),
    ({"memory": 40.0}, []),
    ({"memory": 40.0, "sent": 103.0}, [("payload_bytes", 3.0), ("payload_bytes", 3.0)]),
    ({"memory": 40.0, "seconds": 0.08}, [("seconds", 20.0)]),
])  # fmt: skip
def test_a_bar_that_is_missed_is_named(changed, said):
    found_late = missed(bars([outcome("a_2_100Mbit", found(**changed))]))
    assert [bar.figures for bar in found_late] == [[pytest.approx(figure)] for _, figure in said]
    assert all(name in bar.says for bar, (name, _) in zip(found_late, said, strict=True))


def test_one_bad_cell_of_ten_is_let_pass_unless_it_is_far_off():
    good, bad = outcome("a", found(memory=40.0)), outcome("b", found("chosen", memory=40.0))
    (regret,) = missed(bars([good] * 9 + [bad]))
    assert regret.wanted == "15% or less" and regret.figures == [pytest.approx(20.0)]
    assert len(missed(bars([good] * 8 + [bad] * 2))) == 2


def test_a_report_names_every_cell_and_the_worst():
    text = report([outcome("vision_2_100Mbit", found()), outcome("vision_4_100Mbit", found("chosen"))])
    assert text.count("| vision_") == 2
    assert "* regret: vision_4_100Mbit 20% (chosen, best all_reduce)" in text


def test_where_packets_were_not_counted_bytes_with_headers_are_judged():
    one = found(sent=110.0)
    for block in one["first"]:
        del block["sent_payload_bytes"]
    told = {bar.says: bar for bar in bars([outcome("vision_2_1000Mbit", one)])}
    assert [bar.verdict for says, bar in told.items() if says.startswith("payload_bytes")] == ["not measured"] * 2
    (late,) = (bar for says, bar in told.items() if says.startswith("bytes with headers"))
    assert late.figures == [pytest.approx(100 * (110 / 106 - 1))] and late.verdict == "**miss**"
    assert "| - | +3.8% |" in report([outcome("vision_2_1000Mbit", one)])


def test_the_grid_is_the_product_and_names_are_its_files():
    cells = grid()
    alone = [cell for cell in cells if cell.ranks_per_host == 1]
    assert len(alone) == len(WORKLOADS) * len(WORKERS) * len(SPEEDS) == 36
    assert len(cells) == len({cell.name for cell in cells}) == 36 + 8
    shared = next(cell for cell in cells if cell.name == "vision_3x2_300Mbit")
    assert (shared.hosts, shared.workers) == (3, 6)
    assert Cell("vision", 8, 0.0).name == "vision_8_unshaped" and Cell("vision", 8, 100.0).name == "vision_8_100Mbit"


def test_bytes_of_hosts_of_several_ranks_are_not_compared():
    one = found()
    one["conditions"]["ranks_per_host"] = 2
    shared, alone = outcome("vision_3x2_300Mbit", one), outcome("vision_2_100Mbit", found(sent=103.0))
    assert math.isnan(shared.error("all_reduce").sent_bytes)
    assert {bar.verdict for bar in bars([shared]) if "bytes of" in bar.says and "memory" not in bar.says} == {
        "not measured"
    }
    late = [bar.figures for bar in missed(bars([shared, alone])) if "payload_bytes" in bar.says]
    assert late == [[pytest.approx(3.0)]] * 2
    text = report([shared, alone])
    assert "* payload_bytes: vision_2_100Mbit +3%" in text
    (row,) = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| vision_3x2"))
    assert row[7:] == ["-", "-", "+25%", "+10%", "-20%"] and "nan" not in report([shared])
