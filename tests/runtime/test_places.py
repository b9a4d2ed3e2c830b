"""Other tensors stand in a module for a while, as torch's own call has it; then its own are back, whatever happened."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from armillary.stages.partition import Places


class Tied(nn.Module):
    """One weight in two modules, a buffer, and a part without one of its parameters."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.other.weight = self.one.weight
        self.norm = nn.BatchNorm1d(3)

    def forward(self, value):
        return self.norm(self.other(self.one(value)))


def test_a_module_computes_on_what_stands_there_as_torch_has_it():
    module, value = Tied(), torch.randn(4, 3)
    others = {name: torch.randn_like(p).requires_grad_() for name, p in module.named_parameters()}
    others |= {"norm.running_mean": torch.ones(3), "norm.running_var": torch.full((3,), 2.0)}
    module.eval()
    with Places(module).holding(others):
        assert all(p is others["one.weight"] for p in (module.one.weight, module.other.weight))
        found = module(value)
    assert torch.equal(found, functional_call(module, others, (value,)))
    assert not torch.equal(found, module(value))


def test_its_own_are_back_after_an_error_too():
    module = Tied()
    before = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    with pytest.raises(RuntimeError, match="in the midst"), Places(module).holding({"one.bias": torch.zeros(3)}):
        raise RuntimeError("in the midst")
    after = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items())
    with pytest.raises(KeyError, match="strange"), Places(module).holding({"strange": torch.zeros(3)}):
        pass
