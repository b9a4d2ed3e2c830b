"""What does not fit is refused before anything is cut, in words that say what would do."""

import copy

import pytest
import torch
from cut_models import HEADS, HIDDEN, WIDE, Block, Own, Torchs, batch, loss
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from armillary import residency, tensor

FOUR = {"tensor": 4}
SQUARE = {"row": 2, "column": 2}


def own(**changes):
    model = Own()
    for name, module in changes.items():
        setattr(model.blocks[1], name, module)
    return model


def tied():
    model = Own()
    model.blocks[1].o.weight = model.blocks[0].o.weight
    return model


def across_the_edge():
    model = Own()
    model.extra = nn.Linear(WIDE, WIDE)
    model.extra.weight = model.blocks[0].o.weight
    return model


def compiled():
    model = Own()
    model.blocks[0].compile()
    return model


def hooked():
    model = Own()
    model.blocks[0].up.register_forward_hook(lambda *_: None)
    return model


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.MultiheadAttention(18, 6, batch_first=True)])


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDE))

    def forward(self, x):
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


REFUSALS = {
    "an unknown way": (Own, {"way": "4d", "mesh": FOUR}, "no way '4d'; want one of data, columns_rows, 2d, 2.5d, 3d"),
    "an unknown region": (Own, {"region": "layers", "way": "2d", "mesh": SQUARE}, "the model has no module 'layers'"),
    "no square": (Own, {"way": "2d", "mesh": {"row": 4, "column": 1}}, "want"),
    "no cube": (Own, {"way": "3d", "mesh": {"i": 1, "j": 2, "l": 2}}, "wants axes of one size, a cube"),
    "other axes": (Own, {"way": "2d", "mesh": FOUR}, "2d wants the axes data, row, column, got tensor"),
    "other ranks": (Own, {"way": "columns_rows", "mesh": {"tensor": 2}}, "has 2 ranks, the job has 4"),
    "heads": (Odd, {"way": "columns_rows", "mesh": FOUR}, "has 6 heads, which 4 ranks do not divide; want one of [1"),
    "features": (lambda: own(up=nn.Linear(WIDE, 30)), {"way": "columns_rows", "mesh": FOUR}, "30 outputs, which"),
    "tied inside": (tied, {"way": "2d", "mesh": SQUARE}, "blocks.1.o.weight is tied to blocks.0.o.weight"),
    "tied across": (across_the_edge, {"way": "ring", "mesh": {"sequence": 4}}, "extra.weight is tied to blocks.0.o"),
    "compiled": (compiled, {"way": "2d", "mesh": SQUARE}, "blocks.0 is compiled"),
    "hooks": (hooked, {"way": "columns_rows", "mesh": FOUR}, "blocks.0.up has hooks"),
    "a table": (lambda: own(n1=nn.Embedding(3, WIDE)), {"way": "2d", "mesh": SQUARE}, "blocks.1.n1 is a table"),
    "BatchNorm": (lambda: own(n1=nn.BatchNorm1d(7)), {"way": "heads", "mesh": {"sequence": 4}}, "is a BatchNorm1d"),
    "an own norm": (lambda: own(n1=OwnNorm()), {"way": "2d", "mesh": SQUARE}, "OwnNorm with parameters of its own"),
    "no role": (lambda: own(other=nn.Linear(3, 3)), {"way": "2d", "mesh": SQUARE}, "blocks.1.other has no role"),
    "a wrong role": (Own, {"way": "2d", "mesh": SQUARE, "roles": {"*.q": "columns"}}, "'columns' of blocks.0.q"),
}  # fmt: skip


def refused(rank, world):
    told = {}
    for name, (made, options, _) in REFUSALS.items():
        model = made()
        before = copy.deepcopy(model.state_dict())
        kinds = [type(one) for one in model.modules()]
        try:
            tensor.cut(model, **{"region": "blocks", **options})
        except ValueError as error:
            told[name] = str(error)
        assert [type(one) for one in model.modules()] == kinds
        assert all(torch.equal(one, before[key]) for key, one in model.state_dict().items())
    return told


def test_what_cannot_be_cut_is_refused_by_name_and_left_as_it_was(crew):
    for told in crew(4).run(refused):
        for name, (_, _, wanted) in REFUSALS.items():
            assert wanted in told[name], (name, told.get(name))


class FixedHeads(Block):
    def forward(self, x):
        h = self.n1(x)
        q, k, v = (f(h).view(*h.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v.unflatten(-1, (WIDE // HEADS,)))
        return x + self.o(a.transpose(1, 2).flatten(2))


class OnItsOwn(Block):
    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:])


class Unpaired(Block):
    def forward(self, x):
        return self.up(x)


class HeadNorm(Block):
    """Without weights, so that only its numbers tell."""

    def __init__(self):
        super().__init__()
        self.head_norm = nn.LayerNorm(WIDE // HEADS, elementwise_affine=False)

    def forward(self, x):
        return x + self.o(self.head_norm(self.q(x).unflatten(-1, (-1, WIDE // HEADS))).flatten(2))


class NormBetween(Block):
    def __init__(self):
        super().__init__()
        self.between = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        return x + self.down(self.between(self.up(x)))


class OtherKeys(Block):
    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, WIDE // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + F.scaled_dot_product_attention(q, k[:, :, 1:], v[:, :, 1:]).transpose(1, 2).flatten(2)


class CheckpointInside(Block):
    def forward(self, x):
        return x + checkpoint(self.mlp, x, use_reentrant=self.is_reentrant)

    def mlp(self, x):
        return self.down(F.dropout(F.gelu(self.up(x)), 0.5))


class Reentrant(CheckpointInside):
    is_reentrant = True


class NotReentrant(CheckpointInside):
    is_reentrant = False


class Ignorant(Block):
    def forward(self, x):
        return x[:, :-1]


def forwards(rank, world):
    told = {}
    for kind, way, mesh, samples, tokens in (
        (FixedHeads, "columns_rows", FOUR, 5, 7),
        (OnItsOwn, "2d", SQUARE, 5, 7),
        (Unpaired, "columns_rows", FOUR, 5, 7),
        (Ignorant, "2d", SQUARE, 5, 7),
        (Block, "2d", SQUARE, 1, 7),
        (Block, "ring", {"sequence": 4}, 5, 3),
        (HeadNorm, "2d", SQUARE, 5, 7),
        (OtherKeys, "heads", {"sequence": 4}, 5, 8),
        (OtherKeys, "ring", {"sequence": 4}, 5, 8),
        (Reentrant, "columns_rows", FOUR, 5, 7),
        (NotReentrant, "columns_rows", FOUR, 5, 7),
        (Reentrant, "ring", {"sequence": 4}, 5, 7),
        (lambda: nn.TransformerEncoderLayer(WIDE, HEADS, 32, 0.1, batch_first=True), "ring", {"sequence": 4}, 5, 7),
        (lambda: nn.TransformerEncoderLayer(WIDE, 2, 32, 0.0, batch_first=True), "heads", {"sequence": 4}, 5, 7),
    ):
        torch.manual_seed(0)
        model = Own()
        model.blocks[1] = kind()
        name = getattr(kind, "__name__", "") + way
        try:
            tensor.cut(model, region="blocks", way=way, mesh=mesh)
            loss(model, batch(0, 0, samples, tokens)).backward()
            told[name, samples, tokens] = "fine"
        except (ValueError, RuntimeError) as error:
            told[name, samples, tokens] = str(error)
    return told


def test_a_forward_that_a_cut_does_not_fit_names_module_and_remedy(crew):
    for told in crew(4).run(forwards):
        fixed = told["FixedHeadscolumns_rows", 5, 7]
        assert "tensor: blocks.1: " in fixed and "x.unflatten(-1, (-1, head_width))" in fixed
        assert "layer_norm inside region 'blocks'" in told["OnItsOwn2d", 5, 7]
        assert "blocks.1 made (5, 7, 8)" in told["Unpairedcolumns_rows", 5, 7]
        assert "keep the shape" in told["Ignorant2d", 5, 7]
        assert "want at least 2 samples a replica in region 'blocks'" in told["Block2d", 1, 7]
        assert "want at least 4 tokens a replica" in told["Blockring", 5, 3]
        assert "a norm of 4 features inside a region read (3, 7, 2, 4)" in told["HeadNorm2d", 5, 7]
        assert "has 1 keys for 2 queries of a rank" in told["OtherKeysheads", 5, 8]
        assert "has 1 keys for 2 queries of a rank" in told["OtherKeysring", 5, 8]
        for one in ("Reentrantcolumns_rows", "NotReentrantcolumns_rows", "Reentrantring"):
            assert "checkpoint whole modules of the region" in told[one, 5, 7]
        assert "no attention dropout" in told["<lambda>ring", 5, 7]
        assert "has 2 heads, which 4 ranks do not divide" in told["<lambda>heads", 5, 7]


def between(rank, world):
    model = Own(block=lambda _: NormBetween())
    tensor.cut(model, region="blocks", way="3d", mesh={"i": 2, "j": 2, "l": 2})
    with pytest.raises(ValueError, match="a norm of 32 features"):
        loss(model, batch(0, 0))


def test_3d_refuses_a_norm_between_two_linear_layers(crew):
    crew(8).run(between)


def twice(rank, world):
    model, told = Torchs(), []
    tensor.cut(model, region="blocks.layers", way="2d", mesh=SQUARE)
    for attempt in (
        lambda: tensor.cut(model, region="blocks.layers", way="2d", mesh=SQUARE),
        lambda: residency.hold(model, [batch(0, 0)], loss, constraints={"*": "keep"}).__enter__(),
    ):
        with pytest.raises((ValueError, RuntimeError)) as raised:
            attempt()
        told.append(str(raised.value))
    return told


def test_a_cut_model_is_cut_once_and_held_by_nobody(crew):
    for told in crew(4).run(twice):
        assert all("is cut by armillary.tensor" in one for one in told)
