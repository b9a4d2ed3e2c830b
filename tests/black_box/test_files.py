"""What a run leaves on the disk: checkpoints for any plan and number of workers, and plain PyTorch for the others."""

import shutil
from pathlib import Path

import pytest
import torch
from plain_loop import apart, differ, same, state_of, train
from safetensors.torch import load_file, save_file
from small_models import OPTIMIZERS, Reader, Tied, chain, made, pair_batch, pair_loss, word_batch, word_loss

import face

TABLE = "words.weight"
HALF, STEPS = 3, 6
SEED = 5


def words_plan(workers, exchange="owned_rows", kind=Reader):
    batches = [word_batch(worker, 0) for worker in range(workers)]
    pattern = "*" if exchange == "all_reduce" else TABLE
    return face.plan_for(made(kind), word_loss, batches, workers, exchange={pattern: exchange})


def take(run, steps):
    for step in steps:
        face.step(run, [word_batch(run.rank, step)])


def saved_half_way(rank, world, plan, folder, optimizer="adam", kind=Reader):
    """(path of a checkpoint, weights then, plain state then, weights of the unbroken run at the end)."""
    model = made(kind)
    run = face.start(plan, model, OPTIMIZERS[optimizer](model.parameters()), word_loss)
    take(run, range(HALF))
    path = face.save(run, Path(folder), {"step": HALF, "rank": rank})
    then, exported = face.weights(run), face.export(run)
    take(run, range(HALF, STEPS))
    last, losses = face.weights(run), face.losses(run)
    face.close(run)
    return path, then, exported, last, losses[HALF:]


def resumed(rank, world, plan, path, steps=range(HALF, STEPS), optimizer="adam", kind=Reader):
    """(weights as loaded, what the loop had saved, weights after `steps`, losses)."""
    torch.manual_seed(99)  # other first weights than those that were saved
    model = kind().double()
    run, loop = face.resume(path, plan, model, OPTIMIZERS[optimizer](model.parameters()), word_loss)
    loaded = face.weights(run)
    take(run, steps)
    last, losses = face.weights(run), face.losses(run)
    face.close(run)
    return loaded, loop, last, losses


@pytest.mark.parametrize("exchange", ["all_reduce", "gather_rows", "owned_rows"])
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(crew, tmp_path, exchange):
    plan = words_plan(2, exchange)
    unbroken = crew(2).run(saved_half_way, plan, str(tmp_path))
    for rank, (loaded, loop, last, losses) in enumerate(crew(2).run(resumed, plan, unbroken[0][0])):
        _, then, _, want, told = unbroken[rank]
        assert apart(loaded, then) == {} and apart(last, want) == {} and losses == told
        assert loop == {"step": HALF, "rank": rank}


@pytest.mark.parametrize("others", [1, 3])
def test_a_checkpoint_opens_on_other_numbers_of_workers_under_any_exchange_bit_for_bit(crew, tmp_path, others):
    unbroken = crew(2).run(saved_half_way, words_plan(2), str(tmp_path))
    path, then, exported, _, _ = unbroken[0]
    truth = made(Reader)
    truth.load_state_dict(exported["model"])
    optimizer = OPTIMIZERS["adam"](truth.parameters())
    optimizer.load_state_dict(exported["optimizer"])
    steps = [[word_batch(worker, step) for worker in range(others)] for step in range(HALF, STEPS)]
    train(truth, optimizer, word_loss, steps)
    for exchange in ("owned_rows", "gather_rows", "all_reduce"):
        for loaded, loop, last, _ in crew(others).run(resumed, words_plan(others, exchange), path):
            assert apart(loaded, then) == {} and loop["step"] == HALF
            assert differ(last, state_of(truth)) == {}, exchange


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_a_run_exports_goes_on_in_plain_torch_as_the_run_does(crew, tmp_path, optimizer):
    answers = crew(2).run(saved_half_way, words_plan(2), str(tmp_path), optimizer)
    _, then, exported, last, _ = answers[0]
    assert answers[1][2] is None
    torch.save(exported, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    model = made(Reader)
    model.load_state_dict(plain["model"], strict=True)
    assert apart(state_of(model), then) == {}
    restored = OPTIMIZERS[optimizer](model.parameters())
    restored.load_state_dict(plain["optimizer"])
    steps = [[word_batch(worker, step) for worker in range(2)] for step in range(HALF, STEPS)]
    train(model, restored, word_loss, steps)
    assert differ(state_of(model), last) == {}


def test_a_run_loads_what_plain_torch_saved(crew, tmp_path):
    model = made(Reader)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    steps = [[word_batch(worker, step) for worker in range(2)] for step in range(STEPS)]
    train(model, optimizer, word_loss, steps[:HALF])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    then = state_of(model)
    train(model, optimizer, word_loss, steps[HALF:])
    for loaded, loop, last, _ in crew(2).run(resumed, words_plan(2), tmp_path / "plain.pt"):
        assert apart(loaded, then) == {} and loop == {}
        assert differ(last, state_of(model)) == {}


def test_what_stands_beside_a_plain_model_is_the_loops(crew, tmp_path):
    model = made(Reader)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    beside = {"epoch": 3, "sched": {"last_epoch": 7}}
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**whole, **beside}, tmp_path / "plain.pt")
    assert [loop for _, loop, _, _ in crew(2).run(resumed, words_plan(2), tmp_path / "plain.pt")] == [beside] * 2


def test_an_optimizer_under_another_name_is_not_left_behind(crew, tmp_path):
    model = made(Reader)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 3}, tmp_path / "plain.pt")
    with pytest.raises(Exception, match=r"an optimizer's state under 'opt'.*want it under 'optimizer'"):
        crew(2).run(resumed, words_plan(2), tmp_path / "plain.pt")


def test_an_export_goes_through_safetensors(crew, tmp_path):
    _, then, exported, _, _ = crew(2).run(saved_half_way, words_plan(2), str(tmp_path))[0]
    save_file(exported["model"], tmp_path / "model.safetensors")
    assert same(load_file(tmp_path / "model.safetensors"), then)


def test_tied_weights_are_saved_once_and_come_back_tied(crew, tmp_path):
    batches = [word_batch(worker, 0) for worker in range(2)]
    plan = face.plan_for(made(Tied), word_loss, batches, 2)
    unbroken = crew(2).run(saved_half_way, plan, str(tmp_path), "adagrad", Tied)
    path, then, exported, last, _ = unbroken[0]
    assert torch.equal(exported["model"]["words.weight"], exported["model"]["out.weight"])
    for loaded, _, got, _ in crew(2).run(resumed, plan, path, range(HALF, STEPS), "adagrad", Tied):
        assert apart(loaded, then) == {} and apart(got, last) == {}


def test_a_checkpoint_cut_short_or_changed_is_refused_and_an_older_one_is_the_latest(crew, tmp_path):
    path = crew(2).run(saved_half_way, words_plan(2), str(tmp_path))[0][0]
    files = sorted(one.name for one in path.iterdir())
    copies = []
    for file in files:
        whole = (path / file).read_bytes()
        for number, spoilt in enumerate((whole[: len(whole) // 2], whole[:-9] + b"?" * 9)):
            copies.append(tmp_path / f"copies/{number}{file}" / "step-00000009")
            shutil.copytree(path, copies[-1])
            (copies[-1] / file).write_bytes(spoilt)
    assert len(copies) >= 6
    for answers in crew(2).run(refused_loads, words_plan(2), copies):
        for copy, (said, kept) in zip(copies, answers, strict=True):
            assert said.startswith("load: rank ") and kept == {}, (copy, said)
            assert copy.name in said or copy.parent.name.endswith("complete.json"), (copy, said)
    shutil.copytree(path, tmp_path / "step-00000010")
    (tmp_path / "step-00000010" / files[-1]).unlink()
    with pytest.warns(UserWarning, match="step-00000010"):
        assert face.latest_checkpoint(tmp_path) == path


def refused_loads(rank, world, plan, paths):
    """Of each: what is said, and in what the weights differ from those before."""
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["adam"](model.parameters()), word_loss)
    before, found = face.weights(run), []
    for path in paths:
        try:
            face.load(run, path)
        except (ValueError, RuntimeError) as error:
            found.append((str(error), apart(face.weights(run), before)))
        else:
            found.append(("nothing", {}))
    face.close(run)
    return found


def saved_often(rank, world, plan, folder):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["adam"](model.parameters()), word_loss)
    for step in range(4):
        take(run, [step])
        face.save(run, Path(folder), keep=2)
    face.close(run)


def test_the_newest_checkpoints_stay(crew, tmp_path):
    crew(2).run(saved_often, words_plan(2), str(tmp_path))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert face.latest_checkpoint(tmp_path).name == "step-00000004"


# Schedules that own the loop

SCHEDULES = {
    "one_device(micro_batches=2, stages=2)": 1,
    "pipeline": 2,
    "ring(stages=2)": 2,
    "zero_ring(stages=2)": 2,
    "shared_stages": 3,
    "delayed_all_reduce": 2,
    "gpipe(micro_batches=2)": 2,
    "one_f_one_b(micro_batches=2)": 2,
    "accumulation(micro_batches=2)": 1,
}
NAMES = tuple(SCHEDULES)
RULES = (NAMES[:5], NAMES[5:6], NAMES[6:8], NAMES[8:])  # with two stages and two micro-batches each are the same


def chain_plan(text, processes):
    batches = [pair_batch(0, number) for number in range(processes)]
    return face.plan_for(chain(0.3), pair_loss, batches, processes, schedule=text)


def pair_steps(run, steps):
    for step in steps:
        face.step(run, face.own(run, [pair_batch(step, number) for number in range(2)]))


def scheduled_save(rank, world, plan, folder):
    model = chain(0.3)
    run = face.start(plan, model, OPTIMIZERS["adam"](model.parameters()), pair_loss, pair_batch(0, 0), SEED)
    pair_steps(run, range(HALF))
    path = face.save(run, Path(folder), {"step": HALF})
    then = face.weights(run)
    pair_steps(run, range(HALF, STEPS))
    last = face.weights(run)
    face.close(run)
    return path, then, last


def scheduled_resume(rank, world, plan, path):
    torch.manual_seed(99)
    model = chain(0.3)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    run, loop = face.resume(path, plan, model, optimizer, pair_loss, pair_batch(0, 0), SEED)
    loaded = face.weights(run)
    pair_steps(run, range(HALF, STEPS))
    last = face.weights(run)
    face.close(run)
    return loaded, loop, last


@pytest.mark.parametrize("text", SCHEDULES)
def test_a_schedule_resumes_as_it_went_on_under_its_own_name_and_others(crew, tmp_path, text):
    path, then, last = crew(SCHEDULES[text]).run(scheduled_save, chain_plan(text, SCHEDULES[text]), str(tmp_path))[0]
    (alike,) = [rule for rule in RULES if text in rule]
    for other in {text, *alike[:2]}:
        processes = SCHEDULES[other]
        for loaded, loop, got in crew(processes).run(scheduled_resume, chain_plan(other, processes), path):
            assert loop == {"step": HALF}
            assert apart(loaded, then) == {} and apart(got, last) == {}, other


def opened_at_once(rank, world, plan, path):
    model = chain(0.0)
    run, _ = face.resume(path, plan, model, OPTIMIZERS["adam"](model.parameters()), pair_loss)
    for step in range(HALF, STEPS):
        face.step(run, [pair_batch(step, rank)])
    got = face.weights(run)
    face.close(run)
    return got


def exported_by_schedule(rank, world, plan):
    model = chain(0.3)
    run = face.start(plan, model, OPTIMIZERS["adam"](model.parameters()), pair_loss, pair_batch(0, 0), SEED)
    pair_steps(run, range(HALF))
    exported, got = face.export(run), face.weights(run)
    face.close(run)
    return exported, got


@pytest.mark.parametrize("text", ["pipeline", "zero_ring(stages=2)"])
def test_what_a_schedule_leaves_goes_on_without_it_and_in_plain_torch(crew, tmp_path, text):
    path, then, _ = crew(2).run(scheduled_save, chain_plan(text, 2), str(tmp_path))[0]
    (exported, got), (nothing, _) = crew(2).run(exported_by_schedule, chain_plan(text, 2))
    assert nothing is None and same(exported["model"], then) and apart(got, then) == {}
    model = chain(0.0)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    model.load_state_dict(exported["model"])
    optimizer.load_state_dict(exported["optimizer"])
    train(model, optimizer, pair_loss, [[pair_batch(step, n) for n in range(2)] for step in range(HALF, STEPS)])
    plan = face.plan_for(chain(0.0), pair_loss, [pair_batch(0, n) for n in range(2)], 2)
    for last in crew(2).run(opened_at_once, plan, path):
        assert differ(last, state_of(model)) == {}
