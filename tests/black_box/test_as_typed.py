"""Methods as a user types them: text wherever a `Choice` is taken, and the names that the field has for them."""

from functools import cache

import pytest
import torch
from small_models import chain, pair_batch, pair_loss
from torch import nn

import armillary
import face
from armillary import Choice

MANY = 1 << 16


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(256, MANY // 256)

    def forward(self, x):
        return self.body(x)


@cache
def wide():
    batches = [torch.ones(2, 256)] * 2
    return armillary.profile(Wide(), batches, lambda model, batch: model(batch).square().mean(), workers=2)


def planned(**asked):
    return armillary.plan(wide(), face.machines(2), **asked)


ALIASES = {
    "int8": Choice("quantize", {"bits": 8}),
    "int4": Choice("quantize", {"bits": 4}),
    "int8(tile=64)": Choice("quantize", {"bits": 8, "tile": 64}),
    "fp16": Choice("lower_precision", {"dtype": "float16"}),
    "bf16": Choice("lower_precision", {"dtype": "bfloat16"}),
    "hadamard(of=int4)": Choice("hadamard", {"of": "int4"}),
}


@pytest.mark.parametrize("text", ALIASES)
def test_an_exchange_is_taken_as_text_by_alias_and_as_a_choice_alike(text):
    by_text, by_choice = (planned(constraints={"body.weight": way}) for way in (text, ALIASES[text]))
    assert by_text == by_choice
    assert next(group.exchange for group in by_text.groups if "body.weight" in group.parameters) == ALIASES[text]


STAGED = {
    "1f1b(micro_batches=4)": Choice("one_f_one_b", {"micro_batches": 4}),
    "gpipe(micro_batches=4)": Choice("gpipe", {"micro_batches": 4}),
}


@cache
def cut():
    return armillary.profile(chain(), [pair_batch(0, n) for n in range(4)], pair_loss, workers=2)


def staged(schedule, **edges):
    return armillary.plan(cut(), face.machines(2), schedule=schedule, **edges)


@pytest.mark.parametrize("text", STAGED)
def test_a_schedule_is_taken_as_text_by_alias_and_as_a_choice_alike(text):
    assert staged(text) == staged(STAGED[text]) == staged(Choice.parse(text))
    assert staged(text).schedule.name == STAGED[text].name


def test_codecs_of_edges_are_taken_as_text_and_by_alias():
    by_choice = staged("1f1b", edge=Choice("quantize", {"bits": 8}), edge_back=Choice("same"))
    assert staged("1f1b", edge="int8", edge_back="same") == by_choice
    assert staged("1f1b", edge={0: "int8"}, edge_back={0: "same"}) == by_choice
    assert by_choice.stages[0].edge == Choice("quantize", {"bits": 8})
    remembered = staged("gpipe", edge="aq_sgd(of=int4)").stages[0].edge
    assert remembered == Choice("aq_sgd", {"of": "int4"})


@pytest.mark.parametrize("name", ["int8", "fp16", "hadamard(of=int4)"])
def test_check_knows_aliases(name):
    assert "keeps its" in armillary.check(name)


def test_what_is_no_name_is_refused_as_before():
    with pytest.raises(ValueError, match="no schedule '2f2b'"):
        staged("2f2b")
    with pytest.raises(ValueError, match="to be 'int7', which is no layout and no exchange"):
        planned(constraints={"body.weight": "int7"})
