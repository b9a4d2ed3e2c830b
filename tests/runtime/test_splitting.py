"""Whether a batch may be cut is found by trying: means pass; sums, batch statistics and odd batches are told."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from armillary.profiler.profiler import EXACT_SPLIT, UNTRIED, split_trial


def model_of(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 6), *between, nn.Linear(6, 3))


def batch_of(size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(50, (size, 4), generator=generator), torch.randint(3, (size,), generator=generator)


def mean(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def test_a_mean_over_samples_may_be_cut_whatever_random_layers_draw():
    assert split_trial(model_of(nn.Dropout(0.5)), batch_of(), mean) == EXACT_SPLIT


def test_a_sum_a_token_mean_and_a_term_between_samples_are_no_mean_over_parts():
    def total(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def of_tokens(model, batch):  # the parts have different numbers of counted tokens
        target = torch.where(torch.arange(len(batch[1])) < 2, -100, batch[1])
        return functional.cross_entropy(model(batch[0]), target[: len(batch[1])], ignore_index=-100)

    def contrast(model, batch):
        out = model(batch[0])
        return (out @ out.T).square().mean()

    for loss in (total, of_tokens, contrast):
        assert "no mean over the parts" in split_trial(model_of(), batch_of(), loss), loss


def test_a_gradient_that_differs_though_the_loss_does_not_is_found():
    def hidden(model, batch):
        """The loss of every batch is the same, the gradient goes with the size of the batch."""
        out = model(batch[0]).sum()
        return 1.0 + (out - out.detach())

    assert "gradient of" in split_trial(model_of(), batch_of(), hidden)


@pytest.mark.parametrize(
    ("model", "batch", "said"),
    [
        (model_of(nn.BatchNorm1d(6)), batch_of(), "keeps statistics"),
        (model_of(), batch_of(5), "no first dimension in common that can be halved"),
        (model_of(), (batch_of(6)[0], batch_of(4)[1]), "no first dimension in common"),
    ],
)
def test_what_cannot_be_tried_says_why(model, batch, said):
    assert said in split_trial(model, batch, mean)


class KeepsLast(nn.Module):
    """Leaves what it handed on last where anybody may look at it."""

    def forward(self, values):
        self.last = values
        return values


def test_a_model_that_cannot_be_copied_is_not_tried_and_says_why():
    model = model_of(KeepsLast())
    mean(model, batch_of())
    assert "cannot be run on half a batch: Only Tensors created" in split_trial(model, batch_of(), mean)


@pytest.mark.parametrize("failure", [AssertionError(), KeyError("half"), AttributeError("half\nof it")])
def test_whatever_half_a_batch_raises_is_told_and_stops_nobody(failure):
    def of_whole_batches(model, batch):
        if len(batch[0]) < 6:
            raise failure
        return mean(model, batch)

    said = split_trial(model_of(), batch_of(), of_whole_batches)
    assert said.startswith("a float64 copy of the model cannot be run on half a batch: ")
    assert "half" in said.split(": ")[1] or said.endswith("AssertionError")


def test_a_model_too_large_to_copy_is_left_untried(monkeypatch):
    monkeypatch.setattr("armillary.profiler.profiler.MOST_BYTES", 100)
    assert split_trial(model_of(), batch_of(), mean) == UNTRIED


def test_model_and_random_streams_stay_as_they_were():
    model = model_of(nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.random.get_rng_state()
    split_trial(model, batch_of(), mean)
    assert model.training and all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(stream, torch.random.get_rng_state())
