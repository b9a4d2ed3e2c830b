"""`apart` beside plain loops, sequential and concurrent; saved, loaded, resumed, joined over ranks; faults seen."""

import copy
import random
from functools import partial

import pytest
import torch
from local_models import CLASSES, convolutions, images, loss, perceptron, rows
from plain_local_loops import apart_loops

from armillary import local_losses
from armillary.local_losses import apart_part
from forked import Job

ADAM = partial(torch.optim.Adam, lr=0.01)
TASKS = {
    "perceptron in 2": (perceptron, rows, ["3"]),
    "perceptron in 3": (perceptron, rows, ["2", "4"]),
    "images": (convolutions, images, ["5"]),
}
ROOM = "local_losses: "
SETTINGS = {"classes": CLASSES, "kappa": 1.0, "seed": 5}


def labels(batch):
    return batch[1]


def cut(task, **options):
    model, data, at = TASKS[task]
    parts = local_losses.apart(model(), loss, data(0), at=at, labels=labels, **{**SETTINGS, **options})
    return parts, [data(number, 8) for number in range(4)]


def train(part, source, epochs=3, first_epoch=0):
    optimizer = ADAM(part.parameters())
    found = []
    for given in part.batches(source, epochs, first_epoch):
        optimizer.zero_grad()
        value = part.loss(given)
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


def weights_of(parts):
    return [tensor for part in parts for tensor in part.body.state_dict().values()]


def same(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("concurrent", [False, True], ids=["sequential", "concurrent"])
@pytest.mark.parametrize("task", TASKS)
def test_parts_learn_bit_for_bit_as_in_plain_loops(task, concurrent):
    parts, loader = cut(task, concurrent=concurrent, kappa=2.0)
    bodies = copy.deepcopy([part.body for part in parts])
    torch.manual_seed(1)
    losses = [train(part, loader) for part in parts]
    assert all(found[-1] < found[0] for found in losses)
    torch.manual_seed(1)
    apart_loops(bodies, loader, 3, {**SETTINGS, "kappa": 2.0, "noise": 0.03 if concurrent else None}, ADAM)
    assert same(weights_of(parts), [tensor for body in bodies for tensor in body.state_dict().values()])


def test_the_model_is_trained_with_its_parts():
    model = perceptron()
    before = copy.deepcopy(model.state_dict())
    for part in local_losses.apart(model, loss, rows(0), at=["3"], labels=labels, **SETTINGS):
        train(part, [rows(n) for n in range(3)])
    assert not any(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_outputs_are_made_once_in_evaluation_mode_and_kept_by_sample():
    parts, loader = cut("images")
    train(parts[0], loader)
    calls = []
    hook = parts[0].body.register_forward_hook(lambda module, *_: calls.append(module.training))
    given = list(parts[1].batches(loader, epochs=5))
    again = list(parts[1].batches(loader, epochs=6, first_epoch=5))
    hook.remove()
    assert calls == [False] * len(loader) and parts[0].body.training
    assert len(given) == 5 * len(loader) and len(again) == len(loader)
    made = parts[0].hand_over(loader)
    assert made.samples == 32 and made.nbytes == 32 * made.values[0].numel() * 4
    for epoch in range(5):
        one = given[4 * epoch : 4 * epoch + 4]
        x = torch.cat([part.batch[0] for part in one])
        assert sorted(x.flatten(1).sum(1).tolist()) == sorted(
            torch.cat([b[0] for b in loader]).flatten(1).sum(1).tolist()
        )


def test_a_part_that_is_saved_on_one_machine_goes_on_on_another(tmp_path):
    parts, loader = cut("perceptron in 3")
    for part in parts:
        train(part, loader)
    first, _ = cut("perceptron in 3")  # machine 0
    train(first[0], loader)
    first[0].hand_over(loader).save(tmp_path / "outputs-0")
    first[0].save(tmp_path / "part-0")
    second, _ = cut("perceptron in 3")
    train(second[1], local_losses.HandOver.load(tmp_path / "outputs-0"))
    second[1].hand_over(local_losses.HandOver.load(tmp_path / "outputs-0")).save(tmp_path / "outputs-1")
    second[1].save(tmp_path / "part-1")
    last, _ = cut("perceptron in 3")
    train(last[2], local_losses.HandOver.load(tmp_path / "outputs-1"))
    for part in last[:2]:
        part.load(tmp_path / f"part-{part.number}")
    assert same(weights_of(local_losses.joined(last)), weights_of(parts))


def test_a_run_that_stops_goes_on_as_if_it_had_not(tmp_path):
    for concurrent in (False, True):
        whole, loader = cut("perceptron in 2", concurrent=concurrent)
        stopped, _ = cut("perceptron in 2", concurrent=concurrent)
        for parts in (whole, stopped):
            train(parts[0], loader)
        optimizer = torch.optim.SGD(whole[1].parameters(), 0.1)
        for given in whole[1].batches(loader, epochs=4):
            step(whole[1], optimizer, given)
        optimizer = torch.optim.SGD(stopped[1].parameters(), 0.1)
        for given in stopped[1].batches(loader, epochs=2):
            step(stopped[1], optimizer, given)
        for part in stopped:
            part.save(tmp_path / str(part.number))
        resumed, _ = cut("perceptron in 2", concurrent=concurrent)
        for part in resumed:
            part.load(tmp_path / str(part.number))
        optimizer = torch.optim.SGD(resumed[1].parameters(), 0.1)
        for given in resumed[1].batches(loader, epochs=4, first_epoch=2):
            step(resumed[1], optimizer, given)
        assert same(weights_of(whole), weights_of(resumed))


def step(part, optimizer, given):
    optimizer.zero_grad()
    part.loss(given).backward()
    optimizer.step()


def on_ranks(rank, world, timeout, away, idle):
    parts, loader = cut("perceptron in 2", concurrent=True)
    if rank != idle:
        train(parts[rank], loader)
    if rank == away:
        return []
    try:
        local_losses.joined(parts, timeout)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return weights_of(parts)


def test_ranks_that_train_a_part_each_end_with_all_of_them(crew):
    parts, loader = cut("perceptron in 2", concurrent=True)
    for part in parts:
        train(part, loader)
    for found in crew(2).run(on_ranks, 60.0, None, None):
        assert same(found, weights_of(parts))


def test_a_rank_that_does_not_come_is_named(crew):
    assert "rank 1 did not call joined within 1 s" in crew(2).run(on_ranks, 1.0, 1, None)[0]


def test_ranks_whose_parts_cannot_be_joined_say_why(crew):
    assert crew(2).run(on_ranks, 60.0, None, 1) == [f"{ROOM}rank 1 has not trained part 1; train it before joined"] * 2
    assert all("3 ranks for 2 parts" in found for found in crew(3).run(on_three, 60.0))


def on_three(rank, world, timeout):
    parts, _ = cut("perceptron in 2", concurrent=True)
    try:
        local_losses.joined(parts, timeout)
    except ValueError as error:
        return str(error)


def launched(rank, ranks, timeout, away):
    found = on_ranks(rank, ranks, timeout, away, None)
    print(found if isinstance(found, str) else len(found))


def test_joined_opens_the_job_that_torchrun_starts():
    whole, lacking = Job(2, launched, 60.0, None), Job(2, launched, 2.0, 1)
    assert [one.out for one in whole.ended()] == ["12\n"] * 2
    assert "rank 1 did not call joined" in lacking.ended()[0].out


def test_fault_labels_that_are_a_batch_late_are_seen(monkeypatch):
    parts, loader = cut("perceptron in 2", concurrent=True)
    bodies = copy.deepcopy([part.body for part in parts])
    late = [loader[-1], *loader[:-1]]
    whose = {id(batch): before for batch, before in zip(loader, late, strict=True)}
    monkeypatch.setattr(apart_part.Agreed, "classes_of", lambda self, batch: whose[id(batch)][1])
    for part in parts:
        train(part, loader)
    apart_loops(bodies, loader, 3, {**SETTINGS, "noise": 0.03}, ADAM)
    assert not same(weights_of(parts), [tensor for body in bodies for tensor in body.state_dict().values()])


def test_fault_codes_drawn_anew_after_a_resume_are_seen(tmp_path, monkeypatch):
    parts, loader = cut("perceptron in 2", concurrent=True)
    train(parts[0], loader)
    parts[0].save(tmp_path / "part")
    right, _ = cut("perceptron in 2", concurrent=True)
    monkeypatch.setattr(random, "Random", lambda *_: random.SystemRandom())  # no seed
    anew, _ = cut("perceptron in 2", concurrent=True)
    monkeypatch.undo()
    losses = []
    for resumed in (right, anew):
        resumed[0].load(tmp_path / "part")
        losses.append(train(resumed[0], loader, epochs=4, first_epoch=3))
    assert losses[0][0] != losses[1][0]
    other, _ = cut("perceptron in 2", concurrent=True, seed=6)
    with pytest.raises(ValueError, match="was saved with seed 5, here it is 6; call apart as there"):
        other[0].load(tmp_path / "part")


def test_fault_outputs_of_a_part_that_is_not_trained_are_refused():
    parts, loader = cut("perceptron in 2")
    with pytest.raises(ValueError, match="part 0 is not trained, so its outputs would teach nothing"):
        next(parts[1].batches(loader))


def test_outputs_of_a_part_that_was_trained_on_are_refused(tmp_path):
    parts, loader = cut("perceptron in 2")
    train(parts[0], loader)
    made = parts[0].hand_over(loader)
    train(parts[1], made)
    train(parts[0], loader)
    with pytest.raises(ValueError, match="part 0 was trained on since these outputs were made; call hand_over again"):
        train(parts[1], made)
    with pytest.raises(ValueError, match="part 0 is not as it was when part 1 learnt from its outputs"):
        local_losses.joined(parts)
    train(parts[1], loader)  # made anew
    local_losses.joined(parts)
