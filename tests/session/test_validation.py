"""What ranks must hold alike is compared before the first step; what a run counted is put to the right group."""

import dataclasses

import pytest
import torch
from torch import nn

from armillary.plans import Choice, Group, Mesh, Plan, Record, model_fingerprint
from armillary.session.attach import attach
from armillary.session.traffic_meter import OTHER, TrafficMeter


def model_of(buffer_size=2):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.register_buffer("seen", torch.zeros(buffer_size))
    return model


def plan_of(model, workers):
    names = tuple(name for name, _ in model.named_parameters())
    print_of = model_fingerprint((name, tuple(p.shape), "float32") for name, p in model.named_parameters())
    return Plan(Mesh.of(data=workers), (Group("all", names, "replicated", Choice("all_reduce")),), print_of)


def attach_unlike(rank, workers, what):
    model = model_of(2 + rank if what == "model" else 2)
    plan = plan_of(model, workers)
    if what == "plan" and rank == 1:
        plan = dataclasses.replace(plan, notes=("edited",))
    with pytest.raises(ValueError, match="attach") as caught:
        attach(plan, model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(caught.value)


def test_ranks_with_different_plans_are_refused_on_every_rank(crew):
    one, other = crew(2).run(attach_unlike, "plan")
    assert one == other
    assert "ranks hold different plans (rank 0: " in one and "give all of them the file" in one


def test_ranks_with_different_models_are_refused_naming_rank_and_tensor(crew):
    for message in crew(2).run(attach_unlike, "model"):
        assert (
            "rank 1 holds 'seen' as (3,) float32, rank 0 as (2,) float32; build the same model on every rank" in message
        )


def test_what_a_table_pulls_and_pushes_is_counted_to_its_group_whatever_its_name():
    table = Group("mine", ("embedding.weight",), "row_sharded", Choice("owned_rows"))
    traffic_meter = TrafficMeter(Plan(Mesh.of(data=2), (table,), "0"), window=1)
    labels = ("look-ups", "embedding.weight", "mine")
    for step in (0, 1):
        records = [Record(step, label, "AllToAll", 0.0, 0.5, 10.0) for label in labels]
        traffic_meter.add(tuple(records))
        traffic_meter.steps += 1
        assert traffic_meter.sent_bytes == 30.0 * (step + 1)
    assert traffic_meter.per_step() == {"mine": (20.0, 1.0), OTHER: (10.0, 0.5)}
    assert {record.step for record in traffic_meter.records} == {1}
