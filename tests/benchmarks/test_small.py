"""Every benchmark has its smallest run in `.ci/benchmarks`, by a module that is there."""

import re
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / ".ci" / "benchmarks").read_text()


def test_every_folder_has_a_small_run():
    named = {
        name
        for names in re.findall(r"^ {4}([a-z_ |]+)\) (?:echo|printf)", SCRIPT, re.MULTILINE)
        for name in names.split(" | ")
    }
    assert named == {page.parent.name for page in (ROOT / "benchmarks").glob("*/README.md")}


def test_what_it_runs_is_there():
    modules = re.findall(r'"(benchmarks\.[a-z_.]+)', SCRIPT)
    assert modules and all(find_spec(module) for module in modules)
