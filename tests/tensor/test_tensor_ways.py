"""Each way against one process: weights, the optimizer's state and norms after three AdamW steps with clipping."""

from math import prod

import pytest
import torch
from cut_models import MODELS, largest, state_of, truth
from torch.nn import functional as F

from armillary.tensor.groups import MeshAxis
from armillary.tensor.ring import RingAttention, RingCall

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


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_ring_of_16_bits_is_as_exact_as_torchs_own_attention(kind):
    """One rank is a ring, too. Sums in 16 bits would be four times as far from the truth."""
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 4, 512, 32, generator=draw).to(kind).requires_grad_() for _ in range(3)]
    call = RingCall(MeshAxis("sequence", 1, 0, None), 512, False, 32**-0.5, None)
    apart = []
    for attention in (lambda *given: RingAttention.apply(*given, call), F.scaled_dot_product_attention):
        exact = F.scaled_dot_product_attention(*(doubles := [one.detach().double().requires_grad_() for one in whole]))
        found, onto = attention(*whole), torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(kind)
        gradients = torch.autograd.grad(found, whole, onto), torch.autograd.grad(exact, doubles, onto.double())
        pairs = [(found, exact), *zip(*gradients, strict=True)]
        apart.append([float((one.double() - true).detach().norm() / true.detach().norm()) for one, true in pairs])
    assert all(ours < 1.3 * theirs for ours, theirs in zip(*apart, strict=True)), apart
