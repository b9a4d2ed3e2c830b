"""The data axis of a cut model is anybody's: DDP, FSDP2, and `parallelize` with a table by row and an int8 exchange."""

import copy
import warnings

import pytest
import torch
from cut_models import CLIP, STEPS, adam, batch, cut, largest, loss, truth
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import armillary

MESHES = {"columns_rows": {"data": 2, "tensor": 2}, "2d": {"data": 2, "row": 2, "column": 2}}


def stepped(part, model, optimizer, steps=STEPS):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        found = loss(model, batch(part.data_rank, step % STEPS))
        found.backward()
        part.clip_grad_norm_(CLIP)
        optimizer.step()
        losses.append(float(found))
    return losses


def under_ddp(rank, world, name, way):
    part = cut(name, way, MESHES[way])
    model = DistributedDataParallel(part.model, process_group=part.data_group)
    optimizer = adam(part.model)
    stepped(part, model, optimizer)
    return copy.deepcopy(part.whole_state(optimizer))


def under_fsdp(rank, world, name, way):
    """Saved in the middle, and loaded into another."""
    states = []
    for _ in range(2):
        part = cut(name, way, MESHES[way])
        for block in part.model.get_submodule("blocks" if name == "own" else "blocks.layers"):
            fully_shard(block, mesh=part.mesh["data"])
        fully_shard(part.model, mesh=part.mesh["data"])
        optimizer = adam(part.model)
        if states:
            part.load_whole(states[0], optimizer)
        else:
            stepped(part, part.model, optimizer)
        state = [part.whole_state(optimizer)]
        torch.distributed.broadcast_object_list(state, 0)
        states += state
    assert largest(states[0], states[1])[0] == 0
    return copy.deepcopy(states[0])


def by_row(rank, world, name, way):
    part = cut(name, way, MESHES[way])
    optimizer = adam(part.model)
    constraints = {"embedding.weight": "row_sharded"}
    with armillary.parallelize(part.model, optimizer, constraints=constraints, process_group=part.data_group) as run:
        stepped(part, part.model, optimizer)
        layouts = {one for group in run.plan.groups for one in [group.layout] if "embedding.weight" in group.parameters}
        with pytest.raises(ValueError, match=r"call run.close\(\) first"):
            part.whole_state(optimizer)
    assert layouts == {"row_sharded"}
    return copy.deepcopy(part.whole_state(optimizer))


@pytest.mark.parametrize(
    ("job", "way"), [(under_ddp, "columns_rows"), (under_ddp, "2d"), (under_fsdp, "columns_rows"), (by_row, "2d")]
)
def test_the_data_axis_trains_as_one_process(crew, job, way):
    ranks = 4 if way == "columns_rows" else 8
    expected = truth("own", 2)
    del expected["norms"]
    found = crew(ranks).run(job, "own", way)[0]
    expected["optimizer"] = _as_told(expected["optimizer"], found["optimizer"])
    difference = largest(found, expected)
    assert difference[0] < 1e-10, difference


def _as_told(expected, found):
    """Options of an optimizer are its own; its state is what counts."""
    return {**expected, "param_groups": found["param_groups"]}


def coded(rank, world, way):
    part = cut("own", way, MESHES[way])
    optimizer = adam(part.model)
    constraints = {"blocks.*": "quantize(bits=8)"}
    with armillary.parallelize(part.model, optimizer, constraints=constraints, process_group=part.data_group) as run:
        losses = stepped(part, part.model, optimizer, steps=20)
        return losses, {str(group.exchange) for group in run.plan.groups}


def test_an_int8_exchange_on_the_data_axis_trains(crew):
    for losses, exchanges in crew(4).run(coded, "columns_rows"):
        assert any("quantize" in one for one in exchanges)
        assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def looked_at(rank, world):
    told = []
    for options in (
        {"batches": [batch(0, 0)] * 4, "loss": loss},
        {"batches": [batch(0, 0)] * 4, "loss": loss, "schedule": "gpipe(micro_batches=2)"},
        {"scaler": torch.amp.GradScaler("cpu")},
    ):
        part = cut("own", "columns_rows", {"tensor": world})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                armillary.parallelize(part.model, adam(part.model), process_group=part.data_group, **options)
            except ValueError as error:
                told.append(str(error))
    return told


def test_planning_from_batches_schedules_that_own_the_loop_and_a_scaler_refuse_a_cut_model(crew):
    for told in crew(4).run(looked_at):
        assert len(told) == 3 and all("is cut by armillary.tensor" in one for one in told[:2])
        assert all("plan from the first steps of your own loop" in one for one in told[:2])
        assert "could not agree with a GradScaler on skipped steps; use bfloat16" in told[2]
