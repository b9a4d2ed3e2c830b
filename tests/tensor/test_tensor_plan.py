"""The mesh by price: forecasts beside what was counted, one plan everywhere, and choices on links written by hand."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from cut_models import HIDDEN, ROLES, Block, Own, adam, batch, largest, loss, made, trained, truth
from test_tensor_faults import bias_in_every_term
from test_tensor_refusals import OnItsOwn
from test_tensor_ways import WORLDS

from armillary import Link, Topology, tensor
from armillary.models.preserved_state import LiveBytes
from armillary.tensor import linear


def links(ranks, bytes_per_second, latency_seconds=1e-5):
    link = Link(latency_seconds, bytes_per_second)
    return Topology(ranks, 1, link, link, memory_bytes=1 << 34)


def planned(name, world, **options):
    model, region = made(name)
    given = {"topology": links(world, 1e8), "roles": ROLES, **options}
    return model, tensor.plan(model, batch(0, 0, samples=8, tokens=8), loss, region=region, **given)


def verified(rank, world, name, ways, is_faulty):
    model, plan = planned(name, world)
    before = [one.clone() for one in model.parameters()]
    found = {}
    with patch.object(linear.RowLinear, "forward", bias_in_every_term if is_faulty else linear.RowLinear.forward):
        for way in ways:
            mesh = WORLDS[way]
            batches = [batch(one, 0, samples=8 // mesh.get("data", 1), tokens=8) for one in range(mesh.get("data", 1))]
            verdict = tensor.verify(model, batches, loss, plan.choosing(way, mesh))
            found[way] = verdict.is_equal, verdict.gradients, verdict.sent_bytes, verdict.forecast_bytes
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(one.grad is None for one in model.parameters())
    return found


@pytest.mark.parametrize("name", ["own", "torch's, tokens first"])
def test_verify_finds_every_way_equal_and_bytes_as_forecast(crew, name):
    first, *others = crew(8).run(verified, name, list(WORLDS), False)
    assert all(one == first for one in others)
    for way, (is_equal, gradients, sent, forecast) in first.items():
        assert is_equal and gradients == len(list(made(name)[0].parameters())), way
        assert sent == pytest.approx(forecast, rel=1e-12), way


def without_numbers(rank, world):
    """One rank's gradient of one weight is no number."""
    model, plan = planned("own", world)
    plan = plan.choosing("columns_rows", {"tensor": world})
    hook = partial(torch.full_like, fill_value=float("nan"))

    def judged(model, ids):
        weight = model.blocks[0].up.weight
        if rank == 1 and weight.shape[0] != HIDDEN:
            weight.register_hook(hook)
        return loss(model, ids)

    return tensor.verify(model, [batch(0, 0)], judged, plan).is_equal


def test_a_gradient_that_is_no_number_is_not_equal(crew):
    assert crew(4).run(without_numbers) == [False] * 4


def test_verify_finds_a_planted_fault(crew):
    found = crew(8).run(verified, "own", ["columns_rows", "heads"], True)[0]
    assert [way for way, (is_equal, *_) in found.items() if not is_equal] == ["columns_rows"]


def same(rank, world):
    model, _ = made("own")  # which sets the seed
    stream, (model, plan) = torch.get_rng_state(), planned("own", world)
    assert torch.equal(stream, torch.get_rng_state())
    again = tensor.MeshPlan.from_json(plan.to_json())
    assert again == plan and again.to_json() == plan.to_json()
    assert all(one.grad is None for one in model.parameters())
    edited = replace(again, way="2d", mesh={"data": 2, "row": 2, "column": 2})
    part = tensor.cut(model, edited)
    optimizer = adam(part.model)
    norms = trained(part, optimizer)
    return plan.to_json(), str(plan), norms


def test_every_rank_gets_the_same_plan_and_an_edited_one_is_carried_out(crew):
    first, *others = crew(8).run(same)
    assert all(one[:2] == first[:2] for one in others)
    assert "| 2.5d (depth 2, row 2, column 2) | " in first[1] and "with FSDP2" in first[1]
    assert largest(first[2], truth("own", 2)["norms"])[0] < 1e-10


def chosen(rank, world, options):
    return [planned("own", world, **one)[1] for one in options]


def test_links_and_memory_choose_the_mesh(crew):
    """A tiny model of 176 rows: data parallelism sends the weights, the others activations."""
    slow, tiny = links(4, 1e4), links(4, 1e12, 0.0)
    free, *_ = crew(4).run(chosen, [{"topology": slow}, {"topology": tiny}])[0]
    fitting = sorted(one.held_bytes for one in free.prices)
    capped, forced = crew(4).run(chosen, [{"topology": slow, "memory_bytes": int(m) + 1} for m in fitting[:2]])[0]
    assert len({(one.way, *one.mesh.items(), one.fsdp) for one in free.prices}) == len(free.prices) >= 9
    cheapest = free.prices[0]
    assert free.prices == tuple(sorted(free.prices, key=lambda one: one.seconds))
    for one in (free, capped, forced):
        taken = next(row for row in one.prices if (row.way, dict(row.mesh), row.fsdp) == (one.way, one.mesh, one.fsdp))
        assert one.memory_bytes is None or taken.held_bytes <= one.memory_bytes
        assert one.memory_bytes is not None or taken.seconds <= 1.02 * cheapest.seconds


def held(rank, world, name):
    """By mesh: what the plan foresees, and the most there were of tensors in a step with Adam's state."""
    _, plan = planned(name, world)
    found = {}
    for row in (one for one in plan.prices if not one.fsdp):
        part = tensor.cut(made(name)[0], plan.choosing(row.way, row.mesh))
        for parameter in part.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        live = LiveBytes()
        with live:
            live.mark()
            loss(part.model, batch(0, 0, samples=8 // part.replicas, tokens=8)).backward()
        state = 4 * sum(one.nbytes for one in part.model.parameters())
        found[row.name] = row.held_bytes, state + live.added_bytes
        part.close()
    return found


def test_memory_is_foreseen_as_it_is_held(crew):
    found = crew(8).run(held, "torch's")[0]
    assert {"2d", "2.5d", "3d", "data", "columns_rows", "heads", "ring"} == {row.partition(" ")[0] for row in found}
    off = {row: foreseen / seen for row, (foreseen, seen) in found.items()}
    assert all(0.9 < one < 1.1 for one in off.values()), off


MESHES = (("", 4), ("data 2, ", 2))


class ByValues(Block):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def impossible(rank, world):
    torch.manual_seed(0)
    mixed, given = Own(), batch(0, 0, samples=8, tokens=8)
    mixed.blocks[1] = OnItsOwn()
    plan = tensor.plan(mixed, given, loss, region="blocks", topology=links(world, 1e8))
    mixed.blocks[1] = ByValues()
    with pytest.raises(ValueError, match=r"give tensor\.cut a way and a mesh of your own") as raised:
        tensor.plan(mixed, given, loss, region="blocks", topology=links(world, 1e8))
    mixed.blocks[0], mixed.blocks[1] = OnItsOwn(), OnItsOwn()
    alone = tensor.plan(mixed, given, loss, region="blocks", topology=links(world, 1e8))
    return dict(plan.left_out), str(plan), str(raised.value), dict(alone.left_out)


def test_what_the_model_does_not_allow_is_left_out_and_said(crew):
    for left_out, said, by_values, alone in crew(4).run(impossible):
        assert set(left_out) == {"2d (row 2, column 2)"} and "layer_norm inside region 'blocks'" in said
        assert "Not possible: 2d (row 2, column 2): tensor: layer_norm" in said
        assert "no mesh can be priced (" in by_values
        without = {name for name, why in alone.items() if why.startswith("no scaled_dot_product_attention")}
        assert without == {f"{way} ({data}sequence {many})" for way in ("heads", "ring") for data, many in MESHES}


def refused(rank, world):
    told = []
    for options in ({"memory_bytes": 1}, {"topology": links(2, 1e8)}):
        with pytest.raises(ValueError, match=r"^tensor\.plan: ") as raised:
            planned("own", world, **options)
        told.append(str(raised.value))
    with pytest.raises(ValueError, match="first dimension are the samples") as raised:
        tensor.plan(Own(), (torch.ones(3), torch.ones(4)), loss, region="blocks", topology=links(world, 1e8))
    model, plan = planned("own", world)
    with pytest.raises(ValueError, match="want 4 batches, one for each replica, got 1"):
        tensor.verify(model, [batch(0, 0)], loss, plan.choosing("data", {"data": 4}))
    return told


def test_what_cannot_be_planned_is_refused(crew):
    for told in crew(4).run(refused):
        assert "no mesh fits 1 bytes; the least, " in told[0] and "the topology has 2 ranks, the job 4" in told[1]
