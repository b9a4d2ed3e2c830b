"""What a user of DDP does by habit in the first hour, and nobody else's test looks at: small questions to a handle, a
first start without a checkpoint, a forgotten end, and how much of the library a traceback shows."""

import contextlib
import traceback
from pathlib import Path

import pytest
import torch
from plain_loop import differ, state_of
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss
from torch import nn

import armillary
import face

TABLE = "words.weight"
ASKED = {
    "numel": lambda p: p.numel(),
    "nelement": lambda p: p.nelement(),
    "isinstance Parameter": lambda p: isinstance(p, nn.Parameter),
    "isinstance Tensor": lambda p: isinstance(p, torch.Tensor),
    "shape": lambda p: tuple(p.shape),
    "size": lambda p: (tuple(p.size()), p.size(0), p.size(-1)),
    "dim": lambda p: (p.dim(), p.ndim),
    "len": lambda p: len(p),
    "dtype and device": lambda p: (p.dtype, p.device),
    "bytes": lambda p: p.numel() * p.element_size(),
    "requires_grad": lambda p: (p.requires_grad, p.is_leaf),
    "floating": lambda p: (p.is_floating_point(), p.is_sparse),
    "hash": lambda p: {p: 1}[p],
}


def plan_of(exchange):
    return face.plan_for(made(Reader), word_loss, [word_batch(n, 0) for n in range(2)], 2, exchange={TABLE: exchange})


def asked_of_a_handle(rank, world, plan):
    """What it answers on one rank alone, beside the plain parameter's answers."""
    model = made(Reader)
    plain = {name: ask(model.words.weight) for name, ask in ASKED.items()}
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    run = face.start(plan, model, optimizer, word_loss)
    answers, text, whole = {}, "", ""
    if rank == 0:
        answers = {name: ask(model.words.weight) for name, ask in ASKED.items()}
        text, whole = repr(model.words.weight), repr(model)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count
        assert any(p is model.words.weight for p in model.parameters())
    face.step(run, [word_batch(rank, 0)])  # nobody was asked for anything
    face.close(run)
    return plain, answers, text, whole


def test_numel_repr_isinstance_and_other_small_questions_to_a_handle_are_answered_on_one_rank_alone(crew):
    (plain, answers, text, whole), _ = crew(2).run(asked_of_a_handle, plan_of("owned_rows"))
    assert answers == plain
    assert TABLE in text and "(29, 4)" in text and "owned by workers" in text and "\n" not in text
    assert "Embedding(29, 4)" in whole


def loaded(rank, world, plan, folder, owns_loop):
    """A first start; then a folder that rank 1 does not see."""
    model, loss = (chain(), pair_loss) if owns_loop else (made(Reader), word_loss)
    example = pair_batch(0, 0) if owns_loop else None
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), loss, example)
    before = face.weights(run)
    found = face.load(run, armillary.latest_checkpoint(f"{folder}/empty"))
    untouched = differ(face.weights(run), before, 0.0)
    path = face.save(run, Path(folder), {"step": 7})
    try:
        face.load(run, None if rank == 1 else path)
        said = "nothing"
    except ValueError as error:
        said = str(error)
    again = face.load(run, path)
    face.close(run)
    return found, untouched, said, again


@pytest.mark.parametrize("schedule", ["simultaneous", "pipeline"])
def test_load_of_none_is_a_first_start_and_of_none_on_some_ranks_only_an_error_that_names_them(
    crew, tmp_path, schedule
):
    owns_loop = schedule != "simultaneous"
    plan = plan_of("owned_rows")
    if owns_loop:
        plan = face.plan_for(chain(), pair_loss, [pair_batch(0, n) for n in range(2)], 2, schedule=schedule)
    for found, untouched, said, again in crew(2).run(loaded, plan, str(tmp_path), owns_loop):
        assert found == {} and untouched == {} and again == {"step": 7}
        assert said.startswith("load: path is None on rank 1 ") and "see the same folder" in said, said


def frames_of(call):
    """(frames of the library in the traceback that a user sees, its last line, whether another comes before it)."""
    try:
        call()
    except Exception as error:
        ours = [one for one in traceback.extract_tb(error.__traceback__) if "/src/armillary/" in one.filename]
        text = "".join(traceback.format_exception(error))
        is_chained = "During handling of the above" in text or "direct cause of" in text
        return len(ours), "".join(traceback.format_exception_only(error)).rstrip("\n"), is_chained
    return 0, "", False


def refusals(rank, world, plan):
    model = made(Reader)
    optimizer, batches = OPTIMIZERS["sgd"](model.parameters()), [word_batch(worker, 0) for worker in range(world)]
    found = {
        "a misspelt argument": frames_of(lambda: armillary.parallelize(model, optimizer, prefech=True)),
        "a constraint that names nothing": frames_of(
            lambda: armillary.parallelize(model, optimizer, batches, word_loss, constraints={"zzz": "row_sharded"})
        ),
        "a foreign optimizer": frames_of(
            lambda: armillary.attach(plan, model, OPTIMIZERS["sgd"](made(Reader).parameters()))
        ),
        "a misspelt layout in one line": frames_of(
            lambda: armillary.parallelize(model, optimizer, constraints={"*": "row_shraded"})
        ),
    }
    run = face.start(plan, model, optimizer, word_loss)
    found |= {
        "an id out of range": frames_of(lambda: model(torch.tensor([[1, 99]]))),
        "the whole table": frames_of(lambda: model.words.weight.numpy()),
        "a weight that is not wanted": frames_of(lambda: run.run.weigh(2.0)),
        "the optimizer's state": frames_of(optimizer.state_dict),
        "a checkpoint that is not there": frames_of(lambda: run.run.load("nowhere")),
        "a batch that is none": frames_of(lambda: run.run.step([])),
    }
    face.close(run)
    found["a closed run"] = frames_of(run.run.report)
    return found


MOST_FRAMES = 12  # a plan that is refused has been made in the middle of it


def test_a_traceback_ends_in_one_clear_line_shows_few_frames_of_the_library_and_no_other_error_before(crew):
    for found in crew(2).run(refusals, plan_of("owned_rows")):
        for name, (frames, line, is_chained) in found.items():
            assert line and "\n" not in line, (name, line)
            assert not is_chained or name == "a checkpoint that is not there", name  # what the disk said, first
            assert 0 < frames <= MOST_FRAMES, (name, frames)


def forgotten_end(rank, world):
    """A script that ends without close(); what it had is there, and the next one trains."""
    model = made(Reader)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    run = armillary.parallelize(model, optimizer, constraints={"*": "row_sharded"})
    for step in range(3):
        optimizer.zero_grad()
        word_loss(model, word_batch(rank, step)).backward()
        optimizer.step()
    exported = run.export()
    del run, model, optimizer
    again = made(Reader)
    with contextlib.closing(armillary.parallelize(again, OPTIMIZERS["sgd"](again.parameters()))):
        word_loss(again, word_batch(rank, 0)).backward()
    return exported and exported["model"], state_of(again)


def test_a_forgotten_close_after_equal_batches_loses_nothing(crew):
    (exported, _), (nothing, _) = crew(2).run(forgotten_end)
    assert nothing is None and TABLE in exported
