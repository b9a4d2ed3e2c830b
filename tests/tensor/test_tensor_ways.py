"""Each way against one process: weights, the optimizer's state and norms after three AdamW steps with clipping."""

from math import prod

import pytest
from cut_models import MODELS, largest, state_of, truth

WORLDS = {
    "columns_rows": {"data": 2, "tensor": 4},
    "2d": {"data": 2, "row": 2, "column": 2},
    "2.5d": {"depth": 2, "row": 2, "column": 2},
    "3d": {"i": 2, "j": 2, "l": 2},
    "heads": {"data": 2, "sequence": 4},
    "ring": {"data": 2, "sequence": 4},
}
# With as few ranks as a way shows itself on; over more, and beside a data axis, `verify` finds each equal.
FEW = {**WORLDS, "columns_rows": {"data": 2, "tensor": 2}, "heads": {"sequence": 4}, "ring": {"sequence": 4}}


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("name", MODELS)
def test_a_way_trains_as_one_process(crew, name, way):
    mesh = FEW[way]
    expected = truth(name, mesh.get("data", 1))
    found = crew(prod(mesh.values())).run(state_of, name, way, mesh, {})
    norms, state = found[0]
    assert all(told == norms for told, _ in found) and all(one is None for _, one in found[1:])
    difference = largest({**state, "norms": norms}, expected)
    assert difference[0] < 1e-10, difference
