"""Planted faults, one each: weights or norms after three steps must then differ from one process."""

from unittest.mock import patch

import cut_models
import pytest
import torch
import torch.distributed as dist
from cut_models import largest, state_of, truth
from test_tensor_ways import WORLDS
from torch.nn import functional as F

from armillary.tensor import linear, norms, ring
from armillary.tensor.collectives import sum_forward
from armillary.tensor.groups import ParameterCut


def mean_over_all_ranks(part):
    for parameter in part.model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def bias_in_every_term(self, x):
    return linear.marked_cut(sum_forward(F.linear(x, self.weight, self.bias), self._axis), False)


def with_local_logsum(backward):
    def faulty(ctx, dout):
        q, k, v, out, _ = ctx.saved_tensors
        parts = ring._parts(ctx.call, q, ctx.call.axis.index)
        own = [ring._scores(ctx.call, q, k, ctx.call.axis.index, part).logsumexp(-1) for part in parts]
        wrong = type("Saved", (), {"saved_tensors": (q, k, v, out, torch.cat(own, -1)), "call": ctx.call})
        return backward(wrong, dout)

    return staticmethod(faulty)


def in_modules(kind, change):
    """A fault in what modules of the cut model were given."""
    cut = cut_models.cut

    def faulty(*args):
        part = cut(*args)
        for module in part.model.modules():
            if isinstance(module, kind):
                change(module)
        return part

    return patch.object(cut_models, "cut", faulty)


def no_sum_over_depth(module):
    object.__setattr__(module._gathering, "sum_weight", ())


def no_sum_of_gradients(module):
    module._alike = ()


FAULTS = {
    "mean over all ranks": ("columns_rows", lambda: patch.object(cut_models, "over_data", mean_over_all_ranks)),
    "bias added t times": ("columns_rows", lambda: patch.object(linear.RowLinear, "forward", bias_in_every_term)),
    "norm counts copies": ("2d", lambda: patch.object(ParameterCut, "axes", frozenset({"row", "column"}))),
    "norm counts only this piece": ("2d", lambda: patch.object(ParameterCut, "axes", frozenset())),
    "dw not summed over depth": ("2.5d", lambda: in_modules(linear.GatheredLinear, no_sum_over_depth)),
    "norm gradient not summed": ("2d", lambda: in_modules(norms.CutLayerNorm, no_sum_of_gradients)),
    "local log-sum-exp": (
        "ring",
        lambda: patch.object(ring.RingAttention, "backward", with_local_logsum(ring.RingAttention.backward)),
    ),
}


def with_fault(rank, world, name, mesh, fault):
    way, planted = FAULTS[fault]
    with planted():
        return state_of(rank, world, name, way, mesh, {})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(crew, fault):
    way, _ = FAULTS[fault]
    expected = truth("own", WORLDS[way].get("data", 1))
    (norms_told, state), *_ = crew(8).run(with_fault, "own", WORLDS[way], fault)
    assert largest({**state, "norms": norms_told}, expected)[0] > 1e-6
