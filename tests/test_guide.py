"""The blocks of `docs/guide.md`, run as one script by two ranks."""

import os
import re
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"


def blocks():
    return re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def run_all(rank, workers, folder):
    before = Path.cwd()
    os.chdir(folder)
    names, runs = {"__name__": "guide"}, []
    try:
        for number, block in enumerate(blocks()):
            exec(compile(block, f"guide, block {number}", "exec"), names)
            runs += [names["run"]] if "run" in names and names["run"] not in runs else []
    finally:
        os.chdir(before)
    looked = {group.look_ahead for run in runs for group in run.plan.groups} - {"none"}
    return len(runs), looked, names["loop"], names["told"].step, names["plan"].workers, names["state"] is None


def test_the_guide_runs(crew, tmp_path):
    found = crew(2).run(run_all, str(tmp_path))
    for rank, (runs, looked, loop, step, planned, is_empty) in enumerate(found):
        assert (loop, step, planned, is_empty) == ({"step": 10}, 10, 2, rank == 1)
        assert looked and runs == sum(block.count("run = armillary.") for block in blocks())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
