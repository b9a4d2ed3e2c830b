"""Every reason why a method is not for a model: provoked here, and none is left out."""

import ast
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import armillary
from armillary.plans import advice
from armillary.plans.advice import ADVICE, Adviser

LINK = armillary.Link(1e-4, 1.25e7)
TWO = armillary.Topology(2, 1, LINK, LINK, 1 << 40)
SOURCES = Path(armillary.__file__).parent


class Plain(nn.Module):
    """Two layers, which no method finds anything special in."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(4, 3)

    def forward(self, x):
        return self.only(x).sin()


class Spare(Plain):
    """One of its modules is never called."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4, 4)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.out = nn.Embedding(9, 4), nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.rnn(self.words(x))[0])


class Projected(Recurrent):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 8, batch_first=True, proj_size=3), nn.Linear(3, 3)


class Blocks(nn.Module):
    """Two blocks of an encoder."""

    def __init__(self, heads=2):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, heads, 16, dropout=0.0, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.encoder(x))


def squared(model, batch):
    return model(batch[0]).square().mean()


def classified(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches_of(*shapes):
    return [(torch.randn(shape), torch.randint(0, 3, (shape[0],))) for shape in shapes]


def reasons(model, loss, batches, topology=TWO):
    """By method, of those that are not for it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    page = armillary.advise(model, optimizer, batches, loss, topology=topology)
    return {row.method: row.advice.reason for row in page.rows if not row.advice.applies}


VECTORS = batches_of((4, 4), (4, 4))
SCENES = {
    "plain": lambda: reasons(Plain(), squared, VECTORS),
    "one rank": lambda: reasons(Plain(), squared, VECTORS, TWO.of_one_node(1)),
    "one layer": lambda: reasons(OneLayer(), squared, VECTORS),
    "a spare module": lambda: reasons(Spare(), classified, VECTORS),
    "words": lambda: reasons(Recurrent(), squared, [(torch.randint(0, 9, (4, 5)),)] * 2),
    "a projected state": lambda: reasons(Projected().double(), squared, [(torch.randint(0, 9, (4, 20)),)] * 2),
    "unlike lengths": lambda: reasons(Blocks(), squared, batches_of((4, 6, 8), (4, 5, 8))),
    "unlike samples": lambda: reasons(Blocks(), squared, [(torch.randn(4, 6, 8), torch.randn(3))] * 2),
    "one head, one token": lambda: reasons(Blocks(1), squared, batches_of((4, 1, 8), (4, 1, 8))),
}
NO_STAGE, ALONE = "one stage: nothing to pipeline", "one worker: nothing crosses"
PROVOKED = [
    ("plain", "Parallax", "no table is read by row"),
    ("plain", "PNN", "the loss is no cross entropy of one label a sample"),
    ("plain", "Colossal-AI", "no chain of blocks whose linear layers it knows by name"),
    ("plain", "parallel equations", "not a recurrence, and no causal attention"),
    ("plain", "in situ", "batches come from data that are there, not from a program that runs"),
    ("plain", "local losses", "local_losses: a Plain is no nn.Sequential, so "),
    ("one rank", "all-reduce (DDP)", ALONE),
    ("one rank", "DCT", ALONE),
    ("one rank", "EventGraD", ALONE),
    ("one rank", "Cyclic Data Parallelism", ALONE),
    ("one rank", "1F1B pipeline", ALONE),
    ("one rank", "activation compression", ALONE),
    ("one rank", "local losses", ALONE),
    ("one rank", "asynchronous updates", ALONE),
    ("one rank", "Colossal-AI", "one worker: nothing to cut over"),
    ("one rank", "RePurpose", "one worker: nothing to cut the neurons over"),
    ("one rank", "in situ", "batches come from data that are there"),
    ("one layer", "Cyclic Data Parallelism", NO_STAGE),
    ("one layer", "local losses", NO_STAGE),
    ("one layer", "1F1B pipeline", NO_STAGE),
    ("one layer", "activation compression", NO_STAGE),
    ("one layer", "RePurpose", "repurpose: "),
    ("one layer", "KARMA", "to compute a stage again spares no memory"),
    ("a spare module", "KARMA", "residency: loss(model, batch) does not call ['spare']"),
    ("a spare module", "PNN", "local_losses: at=2 parts of an nn.Sequential with 3 modules"),
    ("words", "RePurpose", "a batch begins with no numbers (float32 or float64)"),
    ("words", "parallel equations", "rnn takes 5 steps, too few to gain"),
    ("a projected state", "parallel equations", "rnn projects its state (proj_size)"),
    ("unlike lengths", "Colossal-AI", "batches cannot be joined along the samples: their tensors differ in shape"),
    ("unlike lengths", "1F1B pipeline", "batches differ in shape, and stages want micro-batches of one shape"),
    ("unlike lengths", "activation compression", "no pipeline cuts this model"),
    ("unlike samples", "Colossal-AI", "tensor.plan: want a batch of tensors whose first dimension are the samples"),
    ("one head, one token", "Colossal-AI", "tensor.cut: encoder.layers.0.self_attn has 1 heads"),
]


class Refusals(set):
    """Where in the sources `not_for` was called: file and line."""

    def watched(self, reason):
        frame = sys._getframe(1)
        self.add((frame.f_code.co_filename, frame.f_lineno))
        return advice.Advice(False, reason)


@pytest.fixture(scope="module")
def provoked():
    """What every scene was told, and where that is said."""
    refusals, patch = Refusals(), pytest.MonkeyPatch()
    with patch.context() as patched:
        for path in said_in():
            name = ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts)
            patched.setattr(importlib.import_module(name), "not_for", refusals.watched)
        return {scene: ask() for scene, ask in SCENES.items()}, refusals


def said_in():
    """The files that say of a method that it is not for a model, each with the lines of the calls."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        calls = [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Call)]
        lines = [range(one.lineno, one.end_lineno + 1) for one in calls if getattr(one.func, "id", "") == "not_for"]
        if lines:
            found[path] = lines
    return found


@pytest.mark.parametrize(("scene", "method", "reason"), PROVOKED)
def test_what_does_not_apply_says_why(provoked, scene, method, reason):
    told, _ = provoked
    assert told[scene].get(method, "it applies").startswith(reason)


def test_no_reason_is_left_that_nothing_here_provokes(provoked):
    _, refusals = provoked
    silent = [
        f"{path.relative_to(SOURCES)}:{lines.start}"
        for path, calls in said_in().items()
        for lines in calls
        if path.name != "asked_methods.py" and not any((str(path), line) in refusals for line in lines)
    ]
    assert silent == [], "provoke it in SCENES"


def test_a_method_whose_function_fails_is_told_so_and_the_others_are_asked(monkeypatch):
    def fails(situation):
        raise KeyError("rows")

    monkeypatch.setitem(ADVICE._entries, "fails", Adviser("it fails", fails))
    found = reasons(Plain(), squared, VECTORS)
    assert found["fails"] == "its advice failed: KeyError: 'rows'" and found["Parallax"] == "no table is read by row"


def test_a_stream_is_for_in_situ_on_one_rank_too():
    for topology in (TWO, replace(TWO.of_one_node(1), memory_bytes=1 << 30)):
        assert "in situ" not in reasons(Plain(), squared, iter(VECTORS), topology)
