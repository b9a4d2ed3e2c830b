"""What every rank of a benchmark runs, end to end in small: nothing else holds its parts together."""

import json
import sys

import pytest
from benchmarks.netlab import Lab, LabUnavailable

pytestmark = pytest.mark.netlab


@pytest.mark.parametrize(
    ("job", "options", "names"),
    [
        ("parallax", "--length 4 --mbit 0 --modes all_reduce,owned,planned --trials 0 --rounds 1 --steps 1",
         {"all_reduce", "owned", "planned"}),
        ("planner", "--workload recommender --seconds 0.1", {"chosen", "chosen again"}),
    ],
)  # fmt: skip
def test_a_job_carries_out_all_that_it_compares(tmp_path, job, options, names):
    out = tmp_path / "found.json"
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{job}.job", *options.split(), "--out", str(out)]
    try:
        with Lab(2, 0) as lab:
            lab.run(command, timeout_seconds=100)
    except LabUnavailable as reason:
        pytest.skip(str(reason))
    found = json.loads(out.read_text())
    assert names <= {block["mode"] for block in found["blocks" if job == "parallax" else "first"]}
