"""Stages are costed by what they do: operations, bytes kept for the backward pass, parameters, seconds."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from armillary.plans import Profile, StageFact
from armillary.profiler.profiler import profile


def summed(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def stages(found: Profile) -> dict[str, StageFact]:
    return {stage.name: stage for stage in found.stages}


def test_operations_go_to_the_stage_that_does_them() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7))
    found = stages(profile(model, [torch.ones(11, 3)], lambda m, x: (m(x) @ torch.ones(7, 2)).sum()))
    want = {"0": 2 * 11 * 3 * 5, "1": 0, "2": 2 * 11 * 5 * 7, "": 2 * 11 * 7 * 2}
    assert {name: stage.forward_flops for name, stage in found.items()} == want


def test_operations_add_up_to_those_torch_counts() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
    x = torch.ones(3, 2, 8, 8)
    with FlopCounterMode(display=False) as counter:
        model(x)
    found = profile(model, [x], summed)
    assert sum(stage.forward_flops for stage in found.stages) == counter.get_total_flops()


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("projection", [0, 3])  # fused on the CPU without a projection, step by step with one
def test_a_recurrent_layer_counts_every_weight_at_every_position(projection: int) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 6, num_layers=2, proj_size=projection)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    model = Recurrent()
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    found = stages(profile(model, [torch.ones(5, 2, 4)], summed))
    assert found["lstm"].forward_flops == 2 * 5 * 2 * matrices


def test_fused_attention_counts_its_two_products() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x * self.scale, x, x)

    found = stages(profile(Attention(), [torch.randn(2, 3, 5, 8)], summed))
    assert found[""].forward_flops == 2 * 2 * (2 * 3) * 5 * 5 * 8


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def test_activations_are_counted_once_and_parameters_not_at_all() -> None:
    found = stages(profile(Two(), [torch.ones(16, 8)], summed))
    one = 16 * 8 * 4
    # layer 0 keeps its input and its output, which layer 1 keeps as well; layer 1 adds its own output only
    assert {name: stage.activation_bytes for name, stage in found.items()} == {
        "layers.0": 2 * one,
        "layers.1": one,
        "": 0,
    }


def test_a_checkpointed_stage_keeps_its_input_only() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.deep, x, use_reentrant=False) * self.scale

    found = profile(Checkpointed(), [torch.ones(16, 8)], summed)
    assert sum(stage.activation_bytes for stage in found.stages) == 2 * 16 * 8 * 4  # what goes in, what comes out


def test_parameters_go_to_the_stage_that_owns_them() -> None:
    found = stages(profile(Two(), [torch.ones(16, 8)], summed))
    assert [found[name].parameter_bytes for name in ("layers.0", "layers.1", "")] == [288, 288, 32]


def test_stages_may_be_chosen() -> None:
    found = stages(profile(Two(), [torch.ones(16, 8)], summed, stages=["layers", "layers.1.0"]))
    assert [found[name].parameter_bytes for name in ("layers", "layers.1.0", "")] == [288, 288, 32]
    assert found["layers"].forward_flops == found["layers.1.0"].forward_flops == 2 * 16 * 8 * 8


@pytest.mark.parametrize("wanted", [["layers.7"], ["layers", "layers"], [""]])
def test_stages_that_are_no_different_modules_are_refused(wanted: list[str]) -> None:
    with pytest.raises(ValueError, match=r"must be different modules; there are layers, layers\.0"):
        profile(Two(), [torch.ones(16, 8)], summed, stages=wanted)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, forward: float, backward: float) -> Tensor:
        time.sleep(forward)
        ctx.backward_seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradient, None, None


class Slow(nn.Module):
    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear, self.forward_seconds, self.backward_seconds = nn.Linear(3, 3), forward, backward

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Sleep.apply(x, self.forward_seconds, self.backward_seconds))


def test_seconds_go_to_the_stage_that_spends_them() -> None:
    model = nn.Sequential(Slow(0.02, 0.0), Slow(0.0, 0.05))
    found = stages(profile(model, [torch.ones(2, 3)], lambda m, x: Sleep.apply(m(x), 0.0, 0.03).sum()))
    assert found["0"].forward_seconds >= 0.02 > found["1"].forward_seconds
    assert found["1"].backward_seconds >= 0.05 > found["0"].backward_seconds
    assert 0.03 <= found[""].backward_seconds < 0.05 and found[""].forward_seconds < 0.02


def test_time_between_stages_belongs_to_none() -> None:
    def between(model: nn.Sequential, x: Tensor) -> Tensor:
        return model[1](Sleep.apply(model[0](x), 0.02, 0.03)).sum()

    found = stages(profile(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [torch.ones(2, 3)], between))
    assert found[""].forward_seconds >= 0.02 and found[""].backward_seconds >= 0.03
    assert max(found["0"].backward_seconds, found["1"].backward_seconds) < 0.03


@pytest.mark.parametrize("kind", ["reentrant", "stops early", "runs to the end"])
def test_a_checkpointed_stage_runs_again_on_its_own_backward_time(kind: str) -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slow, self.last = Slow(0.03, 0.05), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with set_checkpoint_early_stop(kind == "stops early"):
                return self.last(checkpoint(self.slow, x, use_reentrant=kind == "reentrant"))

    found = stages(profile(Kept(), [torch.ones(2, 3, requires_grad=True)], summed))
    assert found["slow"].forward_seconds >= 0.03
    assert found["slow"].backward_seconds >= 0.08
