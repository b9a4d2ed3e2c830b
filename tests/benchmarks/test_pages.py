"""The pages of benchmarks: figures are what the scripts make of the records that are kept, and links lead somewhere."""

import re
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = (
    "breakdown.run", "cyclic_accuracy.report", "cyclic_memory.report", "cyclic_pipeline.run", "cyclic_ring.run",
    "cyclic_shared.run", "cyclic_zero.run", "overhead.run", "turns.run",
)  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_figures_are_those_of_the_records(script):
    folder = BENCHMARKS / script.partition(".")[0]
    page = import_module(f"benchmarks.{script}").page
    made = page() if script.startswith("cyclic_accuracy") else page(folder / "results")
    assert (folder / "figures.md").read_text() == "\n".join(made).rstrip() + "\n"


@pytest.mark.parametrize("page", sorted(path.relative_to(BENCHMARKS).as_posix() for path in BENCHMARKS.glob("*/*.md")))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)\)", (BENCHMARKS / page).read_text())
    assert [link for link in links if not (BENCHMARKS / page).parent.joinpath(link).exists()] == []
