"""Two revisions by turns: each name means the right copy, and the table says what the rounds say."""

import json
import sys

import pytest
from benchmarks.netlab import Lab, LabUnavailable
from benchmarks.netlab.lab import ROOT
from benchmarks.revisions import page
from benchmarks.revisions.page import keep_memory, keep_steps, memory_row, steps_row
from benchmarks.revisions.source import Source


def package(folder, name):
    """A source whose package says its name, and that of what it imports when it is called."""
    inside = folder / name / "src" / "armillary"
    inside.mkdir(parents=True)
    late = "from armillary.late import NAME\n    return NAME"
    (inside / "__init__.py").write_text(f"NAME = {name!r}\n\n\ndef said_late():\n    {late}\n")
    (inside / "late.py").write_text(f"NAME = {name!r} + ' late'\n")
    return folder / name


def test_each_revision_imports_its_own_modules_also_late(tmp_path):
    here = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "armillary"}
    one, other = Source(package(tmp_path, "one")), Source(package(tmp_path, "other"))
    said = []
    for source in (one, other, one):
        with source:
            said += [source.armillary.NAME, source.armillary.said_late()]
    assert said == ["one", "one late", "other", "other late", "one", "one late"]
    assert {name: sys.modules.get(name) for name in here} == here and str(tmp_path) not in str(sys.path)


def test_a_folder_without_the_package_is_refused(tmp_path):
    with pytest.raises(ModuleNotFoundError, match="armillary"):
        Source(tmp_path)


def test_ratios_are_of_one_round():
    rounds = [{"older": 0.1, "newer": 0.2, "older again": 0.1}, {"older": 0.4, "newer": 0.4, "older again": 0.2}]
    assert steps_row("dense", rounds) == "| dense | 250.0 | 1.500 (1.00-2.00) | 0.750 (0.50-1.00) |"


def test_memory_is_of_all_ranks_and_of_the_fullest():
    mib = 1 << 20
    found = memory_row("dense", [[10 * mib, 30 * mib], [20 * mib, 24 * mib], [10 * mib, 10 * mib]])
    assert found == "| dense | 40.0 | 1.100 | 0.500 | 30.0 | 0.800 |"


def test_the_page_holds_what_was_kept_last_of_either_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "HERE", tmp_path)
    monkeypatch.setattr(page, "STEPS", tmp_path / "results" / "steps.json")
    monkeypatch.setattr(page, "MEMORY", tmp_path / "results" / "memory.json")
    told = {"older": "a", "newer": "", "rounds": 1, "steps": 6, "machine": "a machine"}
    keep_steps({**told, "cases": {"dense": [{"older": 0.1, "newer": 0.2, "older again": 0.1}]}})
    keep_memory({**told, "cases": {"ring": [[10 << 20], [20 << 20], [10 << 20]]}})
    lines = (tmp_path / "figures.md").read_text().splitlines()
    assert "the working tree over a; 1 rounds of 6 steps" in lines and lines.count("a machine") == 2
    assert "| dense | 100.0 | 2.000 (2.00-2.00) | 1.000 (1.00-1.00) |" in lines
    assert "| ring | 10.0 | 2.000 | 1.000 | 10.0 | 2.000 |" in lines


@pytest.mark.netlab
@pytest.mark.benchmark
def test_a_job_tells_the_peak_of_one_revision(tmp_path):
    out = tmp_path / "found.json"
    told = f"--case dense --older {ROOT} --newer {ROOT} --who older --steps 1 --small --out {out}".split()
    try:
        with Lab(2, 0) as lab:
            lab.run([sys.executable, "-m", "benchmarks.revisions.memory_job", *told], timeout_seconds=100)
    except LabUnavailable as reason:
        pytest.skip(str(reason))
    assert all(0 < rank["before"] < rank["peak"] for rank in json.loads(out.read_text())["ranks"])


@pytest.mark.netlab
@pytest.mark.benchmark
def test_a_job_times_both_revisions(tmp_path):
    out = tmp_path / "found.json"
    told = f"--case dense --older {ROOT} --newer {ROOT} --rounds 2 --steps 1 --small --out {out}".split()
    try:
        with Lab(2, 0) as lab:
            lab.run([sys.executable, "-W", "ignore", "-m", "benchmarks.revisions.job", *told], timeout_seconds=100)
    except LabUnavailable as reason:
        pytest.skip(str(reason))
    rounds = json.loads(out.read_text())["rounds"]
    assert [sorted(turn) for turn in rounds] == [["newer", "older", "older again"]] * 2
    assert all(seconds > 0 for turn in rounds for seconds in turn.values())
