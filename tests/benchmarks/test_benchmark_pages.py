"""The pages of benchmarks: figures are what the scripts make of the records that are kept, and links lead somewhere."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OF_A_FOLDER = (
    "breakdown.run", "cyclic_memory.report", "cyclic_pipeline.run", "cyclic_ring.run",
    "cyclic_shared.run", "cyclic_zero.run", "overhead.run", "parallax.page", "peers.report", "planner.run",
    "edges.run", "in_situ.run", "out_of_core.run", "transfer.run", "turns.run",
)  # fmt: skip
OF_A_FILE = ("owners.run", "played.run", "watched.run")
OF_ALL_IT_KNOWS = ("cyclic_accuracy.report",)


@pytest.mark.parametrize("script", [*OF_A_FOLDER, *OF_A_FILE, *OF_ALL_IT_KNOWS])
def test_figures_are_those_of_the_records(script):
    name = script.partition(".")[0]
    results = BENCHMARKS / name / "results"
    page = import_module(f"benchmarks.{script}").page
    if script in OF_ALL_IT_KNOWS:
        made = page()
    else:
        made = page(results if script in OF_A_FOLDER else json.loads((results / f"{name}.json").read_text()))
    text = made if isinstance(made, str) else "\n".join(made)
    assert (BENCHMARKS / name / "figures.md").read_text().rstrip() == text.rstrip()


@pytest.mark.parametrize("page", sorted(path.relative_to(BENCHMARKS).as_posix() for path in BENCHMARKS.glob("*/*.md")))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", (BENCHMARKS / page).read_text())
    assert [link for link in links if not (BENCHMARKS / page).parent.joinpath(link).exists()] == []
