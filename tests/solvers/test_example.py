"""The example: two lines in place of a loop, and the same training."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "recurrence"


def main_of(name):
    spec = importlib.util.spec_from_file_location(f"recurrence_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_both_scripts_train_alike():
    assert main_of("with_armillary")(3) == pytest.approx(main_of("plain")(3), rel=1e-5)


def test_two_lines_take_the_place_of_a_loop():
    plain, mine = ({*(EXAMPLE / f"{name}.py").read_text().splitlines()[1:]} for name in ("plain", "with_armillary"))
    assert len(mine - plain) == 2 and len(plain - mine) == 5
