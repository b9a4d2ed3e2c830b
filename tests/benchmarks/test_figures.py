"""The page of figures of a benchmark is what its script makes of the records that are kept."""

import json
from pathlib import Path

import pytest
from benchmarks.owners import run as owners
from benchmarks.parallax import page as parallax
from benchmarks.peers import report as peers
from benchmarks.planner import run as planner
from benchmarks.played import run as played
from benchmarks.transfer import run as transfer
from benchmarks.watched import run as watched

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OF_A_FOLDER = {"parallax": parallax, "peers": peers, "planner": planner, "transfer": transfer}
OF_A_FILE = {"owners": owners, "played": played, "watched": watched}


@pytest.mark.parametrize("name", [*OF_A_FOLDER, *OF_A_FILE])
def test_figures_are_those_of_the_records(name):
    results = BENCHMARKS / name / "results"
    if name in OF_A_FOLDER:
        text = OF_A_FOLDER[name].page(results)
    else:
        text = OF_A_FILE[name].page(json.loads((results / f"{name}.json").read_text()))
    assert (BENCHMARKS / name / "figures.md").read_text().rstrip() == text.rstrip()
