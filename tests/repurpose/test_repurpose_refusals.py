"""What cannot be cut is refused in one sentence, by name."""

import pytest
import torch
import torch.nn.functional as F
from nets import closeness, data, perceptron
from torch import nn

from armillary import repurpose

CHAIN = "want a chain of Linear, Conv2d, elementwise activations"


class Forward(nn.Module):
    """A model whose forward is given as a function of (module, x)."""

    def __init__(self, forward, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.given = forward

    def forward(self, x):
        return self.given(self.layers, x)


class TwoInputs(nn.Module):
    def forward(self, x, y=None):
        return x


def hooked():
    model = perceptron()
    model[0].register_forward_hook(lambda module, given, found: 2 * found)
    return model


def residual(layers, x):
    return x + layers[0](x)


def branching(layers, x):
    return layers[0](x) if float(x.sum()) > 0 else x


def always_dropped(layers, x):
    return F.dropout(layers[0](x), 0.5)


square = nn.Linear(12, 12).double()

MODELS = {
    "'add' takes ['x', 'layers_0']: a residual sum": lambda: Forward(residual, square),
    "cannot be followed": lambda: Forward(branching, square),
    "drops values out in evaluation mode; pass training=self.training": lambda: Forward(always_dropped, square),
    "'softmax' (at softmax) is no layer": lambda: Forward(lambda layers, x: layers[0](x).softmax(1), square),
    "LayerNorm '1' is a norm over neurons": lambda: nn.Sequential(square, nn.LayerNorm(12).double()),
    "Softmax '1' is a norm over neurons": lambda: nn.Sequential(square, nn.Softmax(1)),
    "MultiheadAttention 'layers.0' is attention": lambda: Forward(
        lambda layers, x: layers[0](x, x, x)[0], nn.MultiheadAttention(12, 2).double()
    ),
    "GRU '0' is no layer": lambda: nn.Sequential(nn.GRU(12, 3).double()),
    "BatchNorm1d '2' follows no Linear or Conv2d directly": lambda: nn.Sequential(
        square, nn.ReLU(), nn.BatchNorm1d(12).double()
    ),
    "keeps no running statistics": lambda: nn.Sequential(
        square, nn.BatchNorm1d(12, track_running_stats=False).double()
    ),
    "Conv2d '0' has groups": lambda: nn.Sequential(nn.Conv2d(3, 3, 1, groups=3).double()),
    "are torch.float16; want float32 or float64": lambda: nn.Sequential(nn.Linear(12, 3).half()),
    "Flatten '0' flattens other than": lambda: nn.Sequential(nn.Flatten(0), square),
    "the model has no Linear and no Conv2d": lambda: nn.Sequential(nn.ReLU()),
    "the forward takes x and y; want one tensor": TwoInputs,
    "give another output than its forward": hooked,
}  # fmt: skip


REMEDIES = {  # these say something else to do
    "drops values out in evaluation mode; pass training=self.training", "the forward takes x and y; want one tensor",
    "are torch.float16; want float32 or float64", "give another output than its forward",
}  # fmt: skip


@pytest.mark.parametrize("said", MODELS)
def test_a_model_that_is_no_chain_is_refused_by_name(said):
    model = MODELS[said]()
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        repurpose.cut(model, 2, data(perceptron()), lambda one, judging: 0.0)
    assert said in str(refusal.value) and str(refusal.value).startswith("repurpose: ")
    assert CHAIN in str(refusal.value) or said in REMEDIES


def test_a_linear_over_sequences_is_refused():
    batches = [torch.randn(3, 5, 12, dtype=torch.float64) for _ in range(2)]
    with pytest.raises(ValueError, match=r"'0' is given \(3, 5, 12\); want \(batch, features\)"):
        repurpose.cut(perceptron(), 2, batches, lambda one, judging: 0.0)


@pytest.mark.parametrize(("change", "said"), [
    ({"capacities": (0.5, 0.4)}, "capacities: want 2 shares that add up to 1, got [0.5, 0.4], together 0.9"),
    ({"capacities": (0.5, 0.4, 0.1)}, "capacities: want 2 shares"),
    ({"workers": 0}, "workers: want 1 or more, got 0"),
    ({"inputs": "rank 1"}, "inputs: want 'spread' or 'rank 0', got 'rank 1'"),
    ({"drop": -1.0}, "drop: want 0 or more, got -1.0"),
    ({"batches": []}, "batches: want 2 or more, half to calibrate and half to judge; got 0"),
    ({"batches": torch.zeros(4, 12).double()}, "batches: want a list of batches, got one tensor"),
    ({"batches": [{"x": torch.zeros(4, 12)}] * 2}, "want a tensor, or a tuple that begins with one; got dict"),
    ({"measure": lambda one, judging: float("nan")}, "measure: want a finite number, got nan"),
])  # fmt: skip
def test_bad_arguments_are_refused(change, said):
    model = perceptron()
    batches = data(model)
    given = {"workers": 2, "batches": batches, "measure": closeness(model, batches)} | change
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        repurpose.cut(model, **given)
    assert said in str(refusal.value) and str(refusal.value).startswith("repurpose.cut: ")


def test_a_folder_of_another_format_is_refused(tmp_path):
    (tmp_path / "index.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="is of format 99; this version reads 1"):
        repurpose.Shards.load(tmp_path)
