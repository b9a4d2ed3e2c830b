"""What the room refuses, in words that say what to give instead."""

import pytest
import torch
from local_models import CLASSES, convolutions, images, loss, perceptron, rows
from torch import nn

from armillary import local_losses

TIED = nn.Linear(8, 8)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.above(self.below(x).tanh())


class Nested(nn.Module):
    def forward(self, x):
        return {"x": x}


class Unpacked(nn.Module):
    def forward(self, nest):
        return nest["x"]


def scaled(model, batch):
    return torch.amp.GradScaler("cpu").scale(loss(model, batch))


OWN = Own()
SPLIT = {
    "one part": (perceptron(), loss, rows(0), {}, "one part alone learns as by backpropagation; name where the second"),
    "no cut": (perceptron(), loss, rows(0), {"at": ["layer2"]}, r"at=\['layer2'\] must name modules .* 0.0, 0.1, 1.0"),
    "the first": (perceptron(), loss, rows(0), {"at": ["0"]}, "not its first"),
    "falling": (perceptron(), loss, rows(0), {"at": ["4", "2"]}, "in their order"),
    "no sequence": (Own(), loss, rows(0), {"at": ["above"]}, r"Own is no nn.Sequential.*give parts=\[module, ...\]"),
    "other output": (OWN, loss, rows(0), {"parts": [OWN.below, OWN.above]}, "give another output than the Own"),
    "tied": (nn.Sequential(TIED, nn.ReLU(), TIED), loss, rows(0), {"at": ["2"]}, "parts 0 and 1 share 0.weight"),
    "no head": (
        nn.Sequential(nn.Linear(8, 4), Nested(), Unpacked()), loss, rows(0), {"at": ["2"]},
        r"no head leads from what part 0 hands on, dict, to the model's output, \(12, 4\); give one, head=module",
    ),
    "few heads": (perceptron(), loss, rows(0), {"at": ["2", "3"], "head": nn.Linear(16, 4)}, "want a head each, got 1"),
    "other head": (perceptron(), loss, rows(0), {"at": ["2"], "head": nn.Linear(3, 4)}, "fails on what the head of"),
    "scaler": (perceptron(), scaled, rows(0), {"at": ["2"]}, "loss is scaled by a GradScaler"),
    "no images": (perceptron(), loss, rows(0), {"at": ["2"], "objective": "infopro"}, "take objective='task'"),
    "scaled images": (
        convolutions(), loss, (images(0)[0] - 0.5, images(0)[1]), {"at": ["5"], "objective": "infopro"},
        "wants images in 0 to 1, these are in -0.499 to 0.4",
    ),
    "flat values": (convolutions(), loss, images(0), {"at": ["10"], "objective": "infopro"}, "hands on something else"),
    "reach": (perceptron(), loss, rows(0), {"at": ["2"], "reach": 3}, "reach is 1 or 2, got 3"),
    "objective": (perceptron(), loss, rows(0), {"at": ["2"], "objective": "contrast"}, "'task' or 'infopro'"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_split_refuses(name):
    model, of, example, options, said = SPLIT[name]
    with pytest.raises(ValueError, match=said) as refused:
        local_losses.split(model, of, example, **options)
    assert str(refused.value).startswith("local_losses: ")


def activated(last):
    return nn.Sequential(nn.Linear(8, 16), last, nn.Linear(16, CLASSES))


CUT = {"at": ["2"], "classes": CLASSES, "labels": lambda batch: batch[1]}
APART = {
    "one part": (perceptron(), {**CUT, "at": []}, "one part alone"),
    "no labels": (perceptron(), {**CUT, "labels": None}, "wants labels, batch -> classes of its samples"),
    "too many classes": (perceptron(width=6), {**CUT, "classes": 7}, "6 numbers a sample, and there are 7 classes"),
    "classes": (perceptron(), {**CUT, "classes": 2}, r"labels from 0 to 3; want 0 to 1, as classes=2 says"),
    "relu": (activated(nn.ReLU()), {**CUT, "kappa": -1.0}, r"from 0 to .* from -1 to 0; take another"),
    "tanh": (activated(nn.Tanh()), {**CUT, "kappa": 3.0}, "part 0 gives numbers from -1 to 1, whatever its weights"),
    "sigmoid": (activated(nn.Sigmoid()), {**CUT, "kappa": 1.5}, "from 0 to 1, whatever its weights"),
    "regression": (perceptron(), {**CUT, "labels": lambda batch: batch[0][:, 0]}, "a regression has none. Take split"),
    "vocabulary": (perceptron(), {**CUT, "labels": lambda batch: batch[1][:, None]}, "words of a vocabulary"),
    "no weights": (nn.Sequential(nn.ReLU(), nn.Linear(8, CLASSES)), {**CUT, "at": ["1"]}, "no weight to train"),
    "a nest": (nn.Sequential(nn.Linear(8, 8), Nested(), Unpacked(), nn.Linear(8, 4)), CUT, "no tensor of real"),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_apart_refuses(name):
    model, options, said = APART[name]
    with pytest.raises(ValueError, match=said) as refused:
        local_losses.apart(model, loss, rows(0), **options)
    assert str(refused.value).startswith("local_losses: ")


@pytest.mark.parametrize("last", [nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.Identity(), nn.LayerNorm(16)], ids=str)
def test_codes_that_a_cut_can_give_are_taken(last):
    local_losses.apart(activated(last), loss, rows(0), **CUT)


def test_half_precision_is_refused_where_a_scaler_would_come_too_late():
    local = local_losses.split(perceptron(), loss, rows(0), at=["3"])
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="take bfloat16, which needs no scaling"):
        local.loss(rows(0))
    with torch.autocast("cpu", torch.bfloat16):
        local.loss(rows(0)).backward()


def test_files_that_are_no_parts_are_refused(tmp_path):
    (tmp_path / "other").write_text("no part")
    part = local_losses.apart(perceptron(), loss, rows(0), **CUT)[0]
    for load in (part.load, local_losses.HandOver.load):
        with pytest.raises(ValueError, match=r"local_losses: .*other is no"):
            load(tmp_path / "other")
    part.save(tmp_path / "part-0")
    last = local_losses.apart(perceptron(), loss, rows(0), **CUT)[1]
    with pytest.raises(ValueError, match="saved with part 0, here it is 1"):
        last.load(tmp_path / "part-0")


def test_batches_that_cannot_be_kept_by_sample_are_refused():
    parts = local_losses.apart(perceptron(), loss, rows(0), **CUT)
    with torch.no_grad():
        next(parts[0].parameters()).add_(1.0)
    with pytest.raises(ValueError, match="a nest of tensors whose first dimension is the samples"):
        next(parts[1].batches([(*rows(0), 0.5)]))
    with pytest.raises(ValueError, match="part 0 has no outputs, as the loader gives nothing"):
        next(parts[1].batches([]))
    made = parts[0].hand_over([rows(0)])
    with pytest.raises(ValueError, match="part 0 reads no outputs of another; give it the loader"):
        next(parts[0].batches(made))
