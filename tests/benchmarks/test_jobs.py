"""What every rank of a benchmark runs, end to end in small: nothing else holds its parts together."""

import json
import sys

import pytest
from benchmarks.netlab import Lab, LabUnavailable

pytestmark = [pytest.mark.netlab, pytest.mark.benchmark]


@pytest.mark.parametrize(
    ("job", "links", "options", "kept_as", "names"),
    [
        ("parallax", (2, 0), "--length 4 --mbit 0 --modes all_reduce,owned,planned --autotune 0 --rounds 1 --steps 1",
         "blocks", {"all_reduce", "owned", "planned"}),
        ("planner", (2, 0), "--workload recommender --seconds 0.1", "first", {"chosen", "chosen again"}),
        ("breakdown", (4, 30), "--mbit 30 --rounds 1 --steps 1 --small --folder {}", "turns",
         {"alone", "nothing", "rounds", "messages", "everything"}),
        ("lossy", (2, 30),
         "--task perceptron --small --mbit 30 --contenders exact,int8,ddp_powersgd --rounds 1 --steps 1", "turns",
         {"exact", "int8", "ddp_powersgd"}),
    ],
)  # fmt: skip
def test_a_job_carries_out_all_that_it_compares(tmp_path, job, links, options, kept_as, names):
    out, told = tmp_path / "found.json", options.format(tmp_path).split()
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{job}.job", *told, "--out", str(out)]
    try:
        with Lab(*links) as lab:
            lab.run(command, timeout_seconds=100, pin=True)
    except LabUnavailable as reason:
        pytest.skip(str(reason))
    found = json.loads(out.read_text())
    assert names <= {block["mode"] for block in found[kept_as]}
