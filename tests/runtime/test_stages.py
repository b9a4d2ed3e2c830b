"""Cutting a model: balanced, complete, the same function as before, or refused with the reason."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from armillary.models.structure import balanced
from armillary.reference.versions import Reference
from armillary.schedules.cyclic import cyclic
from armillary.schedules.simultaneous import simultaneous
from armillary.stages.interpreter import Interpreter
from armillary.stages.partition import chain, costs, cut, same_as_model, ties_between, ties_of
from armillary.stages.tracer import cut_traced
from armillary.stages.train_spec import TrainSpec
from staged_models import OPTIMIZERS, same, squared_error, weights


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, value):
        return value + self.dropout(torch.relu(self.norm(self.inner(value))))


class Skipping(nn.Module):
    """No chain: the embedding is added again at the end, and a second argument is first read there."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, ids, factor):
        first = value = self.embedding(ids).mean(1)
        for block in self.blocks:
            value = block(value)
        return self.head(value + factor * first)


class Blocks(nn.Module):
    """A chain, though no nn.Sequential."""

    def __init__(self, block=Block):
        super().__init__()
        self.into = nn.Linear(5, 4)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(4, 5)

    def forward(self, value):
        value = self.into(value)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


def dominant(points, link_costs):
    edges = [0, *points, len(link_costs)]
    return max(sum(f + b for f, b in link_costs[start:end]) for start, end in itertools.pairwise(edges))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=7), st.data())
@settings(max_examples=50)
def test_no_other_cut_has_a_cheaper_dearest_stage(link_costs, drawn):
    stages = drawn.draw(st.integers(1, len(link_costs)))
    points = balanced(link_costs, stages)
    others = itertools.combinations(range(1, len(link_costs)), stages - 1)
    assert dominant(points, link_costs) == min(dominant(other, link_costs) for other in others)


def test_a_cut_into_more_stages_than_modules_is_refused():
    with pytest.raises(ValueError, match="2 modules make no 3 stages"):
        balanced([(1, 1), (1, 1)], 3)


def test_a_linear_layer_costs_twice_its_products_forward_and_twice_that_backward():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    batch = 3
    numbers = [batch * 16, batch * 16, batch * 4]
    products = [2 * batch * 8 * 16, 0, 2 * batch * 16 * 4]
    want = [(p + n, 2 * p + 2 * n) for p, n in zip(products, numbers)]
    assert costs(chain(model), torch.randn(batch, 8)) == want


def test_a_sequential_is_opened_and_its_parameters_keep_their_names():
    model = nn.Sequential(nn.Linear(5, 4), nn.Sequential(Block(), nn.Sequential(Block(), nn.ReLU())), nn.Linear(4, 5))
    links = chain(model)
    assert [path for path, _ in links] == ["0", "1.0", "1.1.0", "1.1.1", "2"]
    stages = cut(model, links, [1, 3])
    named = {name: p for stage in stages for local, name in stage.names.items()
             for p in [stage.module.get_parameter(local)]}  # fmt: skip
    assert named.keys() == dict(model.named_parameters()).keys()
    assert all(named[name] is parameter for name, parameter in model.named_parameters())
    same_as_model(model, stages, torch.randn(3, 5))


def test_a_list_of_blocks_is_cut_by_path():
    model = Blocks()
    stages = cut(model, chain(model, ["into", "blocks", "head"]), [2, 4])
    assert sorted(stages[1].names.values())[0] == "blocks.1.inner.bias"
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    same_as_model(model, stages, torch.randn(3, 5))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_chain_that_is_not_the_models_forward_is_refused():
    model = Blocks()
    stages = cut(model, chain(model, ["into", "blocks.1", "blocks.0", "blocks.2", "head"]), [2])
    with pytest.raises(ValueError, match="2 stages one after the other do not compute what Blocks does"):
        same_as_model(model, stages, torch.randn(3, 5))


@pytest.mark.parametrize(
    ("paths", "complaint"),
    [
        ((), "a Blocks is no nn.Sequential; name the modules"),
        (("into", "head"), "holds blocks.0.inner.weight"),
        (("into", "bloks"), "no module 'bloks'"),
    ],
)
def test_what_is_no_chain_is_refused_with_the_reason(paths, complaint):
    with pytest.raises(ValueError, match=complaint):
        chain(Blocks(), paths)


@pytest.mark.parametrize("points", [(0,), (2, 2), (3, 1), (5,)])
def test_cuts_out_of_order_are_refused(points):
    with pytest.raises(ValueError, match="want rising points inside"):
        cut(Blocks(), chain(Blocks(), ["into", "blocks", "head"]), points)


def test_weights_tied_across_stages_are_the_first_ones_and_within_one_nobody_shares_them():
    model = Blocks()
    model.blocks[2].inner.weight = model.blocks[0].inner.weight
    links = chain(model, ["into", "blocks", "head"])
    apart = cut(model, links, [2])
    ((first, second),) = ties_between(apart)
    assert (first.name, second.name) == ("blocks.0.inner.weight", "blocks.2.inner.weight")
    assert (first.stage, second.stage) == (0, 1)
    (tie,) = ties_of(apart).items()
    assert tie == (1, (0, {"blocks.0.inner.weight": model.blocks[0].inner.weight}))
    assert not ties_of(cut(model, links, [1]))


def test_a_stage_that_shares_with_two_others_is_refused():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    model[2].weight, model[2].bias = model[0].weight, model[1].bias
    with pytest.raises(ValueError, match="stage 2 shares parameters with stages 0, 1; want all of them with one"):
        ties_of(cut(model, chain(model), [1, 2]))


def test_a_model_that_is_no_chain_trains_the_same_in_traced_stages():
    results = []
    for traced in (False, True):
        torch.manual_seed(3)
        model = Skipping().double()
        for block in model.blocks:
            block.dropout.p = 0.0  # the whole model draws all its random numbers in one stage
        ids, factor = torch.randint(0, 10, (4, 6, 5)), torch.tensor(0.5, dtype=torch.float64)
        target = torch.randn(4, 6, 5, dtype=torch.float64)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        if traced:
            stages = cut_traced(model, (ids[0], factor), ["blocks.1", "blocks.2"])
            assert "forward" not in vars(model.blocks[1])
            run = Interpreter(stages, optimizer, TrainSpec(simultaneous(2, 3), squared_error))
        else:
            run = Reference([Apart(model)], optimizer, simultaneous(2, 1), squared_error)
        for _ in range(3):
            run.step([((ids[m], factor), target[m]) for m in range(2)])
        results.append([*weights(model), *(buffer.clone() for buffer in model.buffers())])
    assert same(*results)


class Apart(nn.Module):
    """A model whose arguments come as one tuple."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, value):
        return self.model(*value)


def test_traced_stages_talk_to_their_neighbours_only_and_hold_the_models_parameters():
    model = Skipping()
    ids, factor = torch.randint(0, 10, (6, 5)), torch.tensor(0.5)
    stages = cut_traced(model, (ids, factor), ["blocks.0", "blocks.2"])
    value = stages[0].module((ids, factor))
    assert isinstance(value, dict) and all(isinstance(leaf, Tensor) for leaf in value.values())
    names = [name for stage in stages for name in stage.names.values()]
    assert sorted(names) == sorted(dict(model.named_parameters()))
    assert all(
        stage.module.get_parameter(local) is model.get_parameter(name)
        for stage in stages
        for local, name in stage.names.items()
    )


def test_traced_stages_draw_by_place_under_every_schedule():
    results = []
    for reference in (True, False):
        torch.manual_seed(3)
        model = Skipping().double()
        ids, factor = torch.randint(0, 10, (2, 6, 5)), torch.tensor(0.5, dtype=torch.float64)
        target = torch.randn(2, 6, 5, dtype=torch.float64)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        stages = cut_traced(model, (ids[0], factor), ["blocks.1", "blocks.2"])
        modules = [stage.module for stage in stages]
        run = (Reference(modules, optimizer, cyclic(2, 3), squared_error) if reference
               else Interpreter(stages, optimizer, TrainSpec(cyclic(2, 3), squared_error)))  # fmt: skip
        for _ in range(4):
            run.step([((ids[m], factor), target[m]) for m in range(2)])
        if not reference:
            run.settle()
        results.append(weights(model))
    assert same(*results)


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, value):
        return self.inner(value) if value.sum() > 0 else value


def test_the_module_that_stops_the_tracer_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Deciding()), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"module '1.1' \(Deciding\) cannot be traced"):
        cut_traced(model, (torch.randn(2, 4),), ["2"])


def test_a_point_the_forward_reaches_twice_is_refused():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.ReLU(), shared)
    with pytest.raises(ValueError, match="1 points make 3 stages"):
        cut_traced(model, (torch.randn(2, 4),), ["1"])
