"""What one mesh saves another loads, and one process too, and all go on as one process that never stopped."""

import copy

import pytest
import torch
from cut_models import CLIP, MODELS, STEPS, adam, batch, cut, largest, loss, made, trained, truth
from torch import nn

MESHES = {
    "2d": {"data": 2, "row": 2, "column": 2},
    "columns_rows": {"data": 2, "tensor": 4},
    "3d": {"i": 2, "j": 2, "l": 2},
}


def saved(rank, world, name, way):
    part = cut(name, way, MESHES[way])
    optimizer = adam(part.model)
    trained(part, optimizer, steps=1)
    return copy.deepcopy(part.whole_state(optimizer))


def gone_on(rank, world, name, way, state):
    part = cut(name, way, MESHES[way])
    optimizer = adam(part.model)
    with torch.no_grad():
        for parameter in part.model.parameters():
            parameter.zero_()
    part.load_whole(state, optimizer)
    trained(part, optimizer, first=1, steps=STEPS - 1)
    return copy.deepcopy(part.whole_state(optimizer))


@pytest.mark.parametrize("name", ["own", "torch's"])
def test_a_state_of_one_mesh_goes_on_on_another_and_in_one_process(crew, name):
    state = crew(8).run(saved, name, "2d")[0]
    expected = truth(name, 2)
    del expected["norms"]
    found = crew(8).run(gone_on, name, "columns_rows", state)[0]
    assert largest(found, expected)[0] < 1e-10
    model, _ = made(name)
    optimizer = adam(model)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for step in range(1, STEPS):
        optimizer.zero_grad()
        (sum(loss(model, batch(one, step)) for one in range(2)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    assert largest({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, expected)[0] < 1e-10


def refused(rank, world, name):
    part, told = cut(name, "3d", MESHES["3d"]), []
    before = [one.clone() for one in part.model.parameters()]
    whole = made(name)[0].state_dict()
    lacking = {key: one for key, one in whole.items() if key != "head.bias"}
    small = {**whole, "head.bias": whole["head.bias"][:3]}
    stranger = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    adafactor = torch.optim.Adafactor(part.model.parameters())
    loss(part.model, batch(0, 0)).backward()
    for attempt in (
        lambda: part.load_whole(None),
        lambda: part.load_whole({"model": lacking}),
        lambda: part.load_whole({"model": small}),
        lambda: part.whole_state(stranger),
        lambda: (adafactor.step(), part.whole_state(adafactor)),
    ):
        try:
            attempt()
            told.append("fine")
        except ValueError as error:
            told.append(str(error))
        if len(told) < 4:
            assert all(torch.equal(one, other) for one, other in zip(before, part.model.parameters(), strict=True))
    return told


def test_what_does_not_fit_is_refused_before_anything_is_loaded(crew):
    for told in crew(8).run(refused, "own"):
        assert "on every rank" in told[0]
        assert "lacks ['head.bias'] and has [] more" in told[1]
        assert told[2] == "tensor: head.bias of the state is (3,), the model wants (11,)"
        assert "make it after the cut" in told[3] and "has another shape than its parameter" in told[4]


def test_names_and_their_order_are_those_of_the_plain_model(crew):
    for name in MODELS:
        plain = list(made(name)[0].state_dict())
        assert list(crew(8).run(saved, name, "3d")[0]["model"]) == plain
