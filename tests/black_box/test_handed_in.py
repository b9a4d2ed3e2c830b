"""Models and optimizers that cannot be trained are refused when they are handed in, on every rank, with what to do."""

import copy

import pytest
import torch
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss
from test_errors import said_by
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

import armillary
import face

TABLE = "words.weight"


def chain_plan(schedule="simultaneous"):
    return face.plan_for(chain(), pair_loss, [pair_batch(0, n) for n in range(2)], 2, schedule=schedule)


def words_plan(exchange="owned_rows"):
    return face.plan_for(made(Reader), word_loss, [word_batch(n, 0) for n in range(2)], 2, exchange={TABLE: exchange})


def of(model, kind=torch.optim.SGD):
    return kind(model.parameters(), lr=0.1)


def spread(model):
    torch.distributed.fsdp.fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    return model


def in_place(model):
    model.compile(backend="eager")
    return model


def part_compiled(model):
    return nn.Sequential(model, torch.compile(nn.Linear(4, 4), backend="eager"))


def as_fsdp(model):
    """The true one wants an accelerator; it is known by its class."""
    known = {"__module__": FullyShardedDataParallel.__module__}
    return type(FullyShardedDataParallel.__name__, (nn.Sequential,), known)(model)


WRAPPED = {
    "DistributedDataParallel": (
        DistributedDataParallel,
        ["is wrapped in DistributedDataParallel", "model.module, and make the optimizer over"],
    ),
    "DDP inside": (lambda m: nn.Sequential(DistributedDataParallel(m)), ["module '0' is wrapped in DistributedData"]),
    "DataParallel": (DataParallel, ["is wrapped in DataParallel", "model.module"]),
    "FSDP": (as_fsdp, ["is wrapped in FullyShardedDataParallel", "plain model"]),
    "fully_shard": (spread, ["went through fully_shard", "plain model"]),
    "torch.compile": (lambda m: torch.compile(m, backend="eager"), ["the model is compiled", "then compile it"]),
    "compiled in place": (in_place, ["the model is compiled", "then compile it"]),
    "a part of it compiled": (part_compiled, ["module '1' is compiled", "then compile it"]),
}


def refused(rank, world, plan, kind):
    """By everything that takes a model; and rank 0 alone has it wrapped."""
    wrap = WRAPPED[kind][0]
    wrapped = wrap(chain().float())
    batches = [tuple(tensor.float() for tensor in pair_batch(0, n)) for n in range(2)]
    asked = batches, pair_loss
    said = [
        said_by(lambda: face.start(plan, wrapped, of(wrapped), pair_loss, pair_batch(0, 0))),
        said_by(lambda: face.parallelize(wrapped, of(wrapped), *asked)),
        said_by(lambda: armillary.auto_plan(wrapped, of(wrapped), *asked)),
        said_by(lambda: armillary.profile(wrapped, *asked)),
    ]
    model = wrapped if rank == 0 else chain().float()
    return said, said_by(lambda: face.start(plan, model, of(model), pair_loss, pair_batch(0, 0)))


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapped_and_compiled_models_are_refused_by_everything_that_takes_a_model(crew, kind):
    for said, one_sided in crew(2).run(refused, chain_plan(), kind):
        for words in WRAPPED[kind][1]:
            assert all(words in one for one in (*said, one_sided)), said
        assert all("rank 0" in one for one in (*said[:3], one_sided))


@pytest.mark.parametrize("schedule", ["pipeline", "delayed_all_reduce"])
def test_a_wrapped_model_is_refused_under_a_schedule(crew, schedule):
    for said, _ in crew(2).run(refused, chain_plan(schedule), "DistributedDataParallel"):
        assert "is wrapped in DistributedDataParallel" in said[0]


def attached_twice(rank, world, plan, kind, loss):
    model = made(Reader) if kind == "words" else chain()
    optimizer = of(model)
    batch = word_batch(0, 0) if kind == "words" else pair_batch(0, 0)
    run = face.start(plan, model, optimizer, loss, batch)
    wider = nn.ModuleDict({"inside": model})
    said = [
        said_by(lambda: face.start(plan, model, of(model), loss, batch)),
        said_by(lambda: face.parallelize(model, optimizer, [batch] * 2, loss)),
        said_by(lambda: face.parallelize(wider, of(wider), [batch] * 2, loss)),
        said_by(lambda: armillary.profile(model, [batch], loss)),
    ]
    handed_in = getattr(run.run._engine, "micro_batches", range(1))
    face.step(run, [batch] * len(handed_in))  # the run at work goes on
    face.close(run)
    run = face.start(plan, model, optimizer, loss, batch)  # and when it is closed another may begin
    face.close(run, gather=False)
    return said, said_by(lambda: face.close(face.start(plan, model, of(model), loss, batch)))


@pytest.mark.parametrize("schedule", ["simultaneous", "pipeline"])
def test_a_model_that_an_open_run_trains_is_refused_until_that_is_closed(crew, schedule):
    for said, again in crew(2).run(attached_twice, chain_plan(schedule), "pairs", pair_loss):
        assert all("already has a plan" in one and "run.close()" in one for one in said), said
        assert again == "nothing"


def test_a_model_whose_tables_are_at_work_or_were_not_gathered_is_refused(crew):
    for said, again in crew(2).run(attached_twice, words_plan(), "words", word_loss):
        assert all("already has a plan" in one for one in said), said
        assert TABLE in again and "without gathering" in again and "build the model anew" in again


def after_an_exception(rank, world, plan):
    model = chain()
    run = face.start(plan, model, of(model), pair_loss, pair_batch(0, 0))
    said = said_by(lambda: raising_in(run))
    run = face.start(plan, model, of(model), pair_loss, pair_batch(0, 0))
    face.step(run, [pair_batch(0, rank)])
    face.close(run)
    return said


def raising_in(run):
    with face.block(run):
        raise ValueError("of the loop itself")


def test_a_model_whose_run_ended_in_an_exception_may_be_trained_again(crew):
    assert crew(2).run(after_an_exception, chain_plan()) == ["of the loop itself"] * 2


def of_foreign_parameters(rank, world, plan):
    model, other = chain(), chain()
    temperature = nn.Parameter(torch.ones(1))
    twice = torch.optim.SGD(model.parameters(), lr=0.1)
    twice.param_groups[0]["params"].append(model[0][0].weight)
    optimizers = [of(other), torch.optim.SGD([*model.parameters(), temperature], lr=0.1), twice]
    before = [[[*group["params"]] for group in one.param_groups] for one in optimizers]
    said = []
    for optimizer in optimizers:
        said.append(said_by(lambda: face.start(plan, model, optimizer, pair_loss, pair_batch(0, 0))))  # noqa: B023
        said.append(said_by(lambda: face.parallelize(model, optimizer, [pair_batch(0, 0)] * 2, pair_loss)))  # noqa: B023
    after = [[[*group["params"]] for group in one.param_groups] for one in optimizers]
    untouched = [[one is other for one, other in zip(*pair)] for pair in zip(sum(before, []), sum(after, []))]  # noqa: RUF017
    return said, all(map(all, untouched))


@pytest.mark.parametrize("schedule", ["simultaneous", "pipeline"])
def test_an_optimizer_over_another_models_parameters_or_with_one_twice_is_refused(crew, schedule):
    for said, untouched in crew(2).run(of_foreign_parameters, chain_plan(schedule)):
        others, others_too, besides, besides_too, twice, twice_too = said
        for one in (others, others_too):
            assert "8 of the 8 tensors of SGD are not parameters of the model" in one and "model.parameters()" in one
        for one in (besides, besides_too):
            assert "1 of the 9 tensors of SGD" in one and "shape (1,)" in one and "nn.ModuleDict" in one
        for one in (twice, twice_too):
            assert "SGD holds '0.0.weight' twice" in one and "once" in one
        assert untouched


# The state of a spread table


def asked_for_state(rank, world, plan, folder):
    model = made(Reader)
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    whole = copy.deepcopy(optimizer.state_dict())
    run = face.start(plan, model, optimizer, word_loss, word_batch(rank, 0))
    face.step(run, [word_batch(rank, 0)])
    said = [
        said_by(lambda: torch.save(optimizer.state_dict(), f"{folder}/optimizer.pt")),
        said_by(lambda: optimizer.load_state_dict(whole)),
    ]
    path = face.save(run, f"{folder}/saved")
    exported = face.export(run)
    face.load(run, path)
    face.close(run)
    closed = optimizer.state_dict()
    same = rank > 0 or all(
        torch.equal(closed["state"][number][entry], value)
        for number, entries in exported["optimizer"]["state"].items()
        for entry, value in entries.items()
    )
    return said, same, len(closed["state"])


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows"])
def test_the_state_of_an_optimizer_that_has_a_part_of_a_tables_is_refused_and_export_gives_it(crew, tmp_path, exchange):
    for rank, (said, same, count) in enumerate(crew(2).run(asked_for_state, words_plan(exchange), str(tmp_path))):
        assert "optimizer.state_dict" in said[0] and TABLE in said[0] and "run.export()" in said[0]
        assert "optimizer.load_state_dict" in said[1] and "run.load" in said[1] and f"rank {rank}" in said[1]
        assert same and count == 5
    assert not (tmp_path / "optimizer.pt").exists()


def asked_for_whole_state(rank, world, plan):
    model = made(Reader)
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    run = face.start(plan, model, optimizer, word_loss, word_batch(rank, 0))
    face.step(run, [word_batch(rank, 0)])
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    face.close(run)
    return {entry: tuple(value.shape) for entry, value in state["state"][0].items()}


def test_the_state_of_an_optimizer_that_has_all_of_it_is_given_as_ever(crew):
    assert [answer["sum"] for answer in crew(2).run(asked_for_whole_state, words_plan("replicated"))] == [(29, 4)] * 2


def asked_under_a_schedule(rank, world, plan):
    model = chain()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    run = face.start(plan, model, optimizer, pair_loss, pair_batch(0, 0))
    face.step(run, face.own(run, [pair_batch(0, n) for n in range(2 * world)])[: len(run.run._engine.micro_batches)])
    said = said_by(optimizer.state_dict)
    face.close(run)
    return said, len(optimizer.state_dict()["state"])


@pytest.mark.parametrize("schedule", ["pipeline", "ring"])
def test_the_state_of_an_optimizer_whose_stages_are_elsewhere_is_refused(crew, schedule):
    for said, count in crew(2).run(asked_under_a_schedule, chain_plan(schedule)):
        assert schedule in said and "run.export()" in said and count == 8


def saved_by_others(rank, world, plan, folder):
    safetensors = pytest.importorskip("safetensors.torch")
    model = made(Reader)
    run = face.start(plan, model, of(model), word_loss, word_batch(rank, 0))
    said = [
        said_by_any(lambda: torch.save(model.state_dict(), f"{folder}/model.pt")),
        said_by_any(lambda: safetensors.save_file(model.state_dict(), f"{folder}/model.safetensors")),
        said_by_any(lambda: safetensors.save_model(model, f"{folder}/model.safetensors")),
    ]
    found = face.load(run, None)
    face.close(run)
    return said, found


def said_by_any(attempt):
    try:
        attempt()
    except Exception as error:
        return str(error)
    return "nothing"


def test_files_of_a_model_with_a_spread_table_are_refused_with_export_as_the_remedy(crew, tmp_path):
    for said, found in crew(2).run(saved_by_others, words_plan(), str(tmp_path)):
        assert all(TABLE in one and "run.export()" in one for one in said), said
        assert found == {}, "no checkpoint yet"
